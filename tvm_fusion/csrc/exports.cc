// What Python sees of the native core, through tvm-ffi.
#include <tvm/ffi/reflection/registry.h>

#include "reachability.h"

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  using tvm::ffi::Array;
  using tvm_fusion::ReachabilityObj;
  refl::ObjectDef<ReachabilityObj>()
      .def(refl::init<int64_t, Array<int64_t>>())
      .def("num_nodes", &ReachabilityObj::NumNodes)
      .def("reaches", &ReachabilityObj::Reaches)
      .def("is_convex", &ReachabilityObj::IsConvex)
      .def("is_acyclic_contracted", &ReachabilityObj::IsAcyclicContracted);
}
