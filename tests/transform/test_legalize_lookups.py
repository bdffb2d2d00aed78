"""Places that a tensor holds and that lie outside: nothing else is read or written, and places inside stay."""

import numpy as np
import pytest
import tvm

import tvm_fusion as tf
from tvm_fusion.compat import relax, structural_equal
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.emulated_plan import EmulatedPlan
from tvm_fusion.transform.legalize import legalize

op = relax.op
X = np.arange(20, dtype="float32").reshape(4, 5) + 1
FAR = (5, -1, 2**40, -(2**40), 2**63 - 1, -(2**63))


def module(make, *shapes):
    """``make`` of ``X``, of places of the first shape, and of values of the others; then an operator to fuse."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(X.shape, "float32"))
    places = relax.Var("places", relax.TensorType(shapes[0], "int64"))
    rest = [relax.Var(f"v{n}", relax.TensorType(s, "float32")) for n, s in enumerate(shapes[1:])]
    with builder.function("main", [x, places, *rest]):
        with builder.dataflow():
            found = builder.emit(make(x, places, *rest))
            result = builder.emit_output(
                builder.emit(op.multiply(found, relax.const(2.0, "float32")))
            )
        builder.emit_func_output(result)
    return builder.get()


LOOKUPS = {
    "take": (lambda x, i: op.take(x, i, 1), ((3,),)),
    "gather_elements": (lambda x, i: op.gather_elements(x, i, 1), ((4, 2),)),
    "gather_nd": (lambda x, i: op.gather_nd(x, i), ((3, 2),)),
    "index_tensor": (lambda x, i: op.index_tensor(x, [i]), ((3,),)),
}
UPDATES = {
    "scatter_elements": (lambda x, i, v: op.scatter_elements(x, i, v, 1), ((4, 2), (4, 2))),
    "scatter_nd": (lambda x, i, v: op.scatter_nd(x, i, v), ((3, 2), (3,))),
    "index_put": (lambda x, i, v: op.index_put(x, (i, i), v), ((3,), (3,))),
}


@pytest.mark.parametrize("place", FAR)
@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_outside_is_of_some_element(name, place):
    make, shapes = LOOKUPS[name]
    model = tf.compile(tf.frontend.from_relax(module(make, *shapes)), "llvm", verify=False)
    (found,) = model(X, np.full(shapes[0], place))
    assert np.isin(found, 2 * X).all()


@pytest.mark.parametrize("place", FAR)
@pytest.mark.parametrize("name", UPDATES)
def test_an_update_outside_changes_nothing_but_the_result(name, place):
    make, shapes = UPDATES[name]
    model = tf.compile(tf.frontend.from_relax(module(make, *shapes)), "llvm", verify=False)
    values = np.full(shapes[1], -1, "float32")
    (found,) = model(X.copy(), np.full(shapes[0], place), values)
    assert np.isin(found, [*2 * X.ravel(), -2]).all()


def test_places_inside_are_as_they_were():
    places = np.array([4, 0, 2])
    mod = tf.frontend.from_relax(module(*LOOKUPS["take"][:1], (3,)))
    (found,) = tf.compile(mod, "llvm", verify=False)(X, places)
    np.testing.assert_array_equal(found, 2 * X[:, places])
    plan = EmulatedPlan(mod, parse_target("cuda:sm_90"))
    assert len(plan.plan.groups) == 1
    np.testing.assert_array_equal(plan(X, places)[0], 2 * X[:, places])


@pytest.mark.parametrize("place", FAR[:4])
def test_on_gpus(place):
    """In the generated source of one kernel, whose emulation has no other memory to read."""
    mod = tf.frontend.from_relax(module(*LOOKUPS["take"][:1], (3,)))
    plan = EmulatedPlan(mod, parse_target("cuda:sm_90"))
    assert len(plan.plan.groups) == 1
    (found,) = plan(X, np.array([0, 1, place]))
    np.testing.assert_array_equal(found[:, :2], 2 * X[:, :2])
    np.testing.assert_array_equal(found[:, 2], 2 * X[:, 4 if place > 0 else 0])


def test_what_knows_its_places_is_left_alone():
    """A lookup that says what it does outside, and one without places from a tensor."""
    for make in (
        lambda x, i: op.take(x, i, 1, mode="clip"),
        lambda x, i: op.take(x, i, 1, mode="wrap"),
        lambda x, i: op.strided_slice(x, [1], [0], [3]),
    ):
        mod = module(make, (3,))
        tvm.ir.assert_structural_equal(legalize(mod), relax.transform.LegalizeOps()(mod))
    for name, (make, shapes) in LOOKUPS.items():
        mod = module(make, *shapes)
        assert not structural_equal(legalize(mod), relax.transform.LegalizeOps()(mod)), name
