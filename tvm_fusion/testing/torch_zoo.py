"""Networks of torchvision, timm and transformers with seeded random weights, small enough to run on a CPU.

Each entry builds one member of a family as its package does, with fewer layers or a smaller image where the package
lets one choose. Importing this module needs PyTorch; building a network needs its package, without downloads.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class ZooModel:
    """One network of the list.

    Parameters
    ----------
    package : str
        ``"torchvision"``, ``"timm"`` or ``"transformers"``.
    name : str
        What the package calls it.
    family : str
        Networks of one family differ in depth and width only.
    make : callable
        Returns the network and its inputs.
    """

    package: str
    name: str
    family: str
    make: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]


class _Outputs(nn.Module):
    """Returns a network's outputs as a tuple of tensors, in the order of the network's dictionary."""

    def __init__(self, net: nn.Module, *keys: str) -> None:
        super().__init__()
        self.net = net
        self.keys = keys

    def forward(self, *inputs: torch.Tensor) -> Any:
        outputs = self.net(*inputs)
        if isinstance(outputs, Mapping):
            return tuple(outputs[key] for key in (self.keys or outputs))
        return outputs


class _Raw(nn.Module):
    """A detection network's backbone and heads, without the proposals that depend on the data."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.backbone = net.backbone
        self.head = getattr(net, "head", None) or net.rpn.head

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = list(self.backbone(image).values())
        outputs = self.head(features)
        outputs = outputs.values() if isinstance(outputs, Mapping) else outputs
        flat: list[torch.Tensor] = []
        for output in outputs:
            flat.extend(output if isinstance(output, list | tuple) else [output])
        return tuple(flat)


def randomise(net: nn.Module, seed: int = 0, gain: float = 1.5) -> nn.Module:
    """Give a network seeded weights and statistics that keep activations of one size; evaluation mode.

    Fresh networks hide errors: their statistics are zeros and ones, their biases and layer scales are next to nothing.
    ``gain`` is the variance of a weight times the number of values that are summed.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(tensor: torch.Tensor, low: float, high: float) -> None:
        with torch.no_grad():
            tensor.uniform_(low, high, generator=generator)

    for name, parameter in net.named_parameters():
        if parameter.ndim >= 2 and parameter.shape[0] > 1:
            fan_in = max(parameter[0].numel(), 1)
            with torch.no_grad():
                parameter.normal_(0, (gain / fan_in) ** 0.5, generator=generator)
        elif name.endswith("bias"):
            uniform(parameter, -0.1, 0.1)
        else:
            uniform(parameter, 0.8, 1.2)
    for name, buffer in net.named_buffers():
        if name.endswith("running_mean"):
            uniform(buffer, -0.1, 0.1)
        elif name.endswith("running_var"):
            uniform(buffer, 0.8, 1.2)
    return net.eval()


def _image(size: int, batch: int = 1) -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(batch, 3, size, size, generator=generator),)


def _without_downloads() -> None:
    """Let torchvision be imported where its binary does not fit PyTorch's: declare the operators that it checks."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)  # the operators live as long as the library
        importlib.import_module("torchvision")


_KEPT: list[Any] = []


def _vision(name: str, family: str, size: int = 64, **options: Any) -> ZooModel:
    def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        _without_downloads()
        models = importlib.import_module("torchvision.models")
        if family == "detection":
            net = models.get_model(name, weights=None, weights_backbone=None)
            return randomise(_Raw(net)), _image(size)
        if family == "segmentation":
            options["weights_backbone"] = None
        if name in ("googlenet", "inception_v3"):
            options["init_weights"] = False
        net = models.get_model(name, weights=None, **options)
        return randomise(_Outputs(net), gain=_GAINS.get(name, 1.5)), _image(size)

    return ZooModel("torchvision", name, family, make)


def _timm(name: str, size: int = 64, *, family: str = "", **options: Any) -> ZooModel:
    def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        _without_downloads()
        timm = importlib.import_module("timm")
        net = timm.create_model(name, pretrained=False, **options)
        return randomise(net), _image(size)

    return ZooModel("timm", name, family or name.split("_")[0], make)


def _text(name: str, config: str, model: str, keys: tuple[str, ...], **sizes: Any) -> ZooModel:
    def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        if importlib.util.find_spec("torchvision"):  # transformers imports it then
            _without_downloads()
        transformers = importlib.import_module("transformers")
        options = getattr(transformers, config)(**sizes)
        net = getattr(transformers, model)(options)
        if config == "ViTConfig":
            return randomise(_Outputs(net, *keys)), _image(sizes["image_size"])
        tokens = torch.arange(2 * 12).reshape(2, 12) * 7 % sizes["vocab_size"]
        return randomise(_Outputs(net, *keys)), (tokens,)

    return ZooModel("transformers", name, name, make)


#: Networks so deep that they double differences in every few layers at the usual gain: PyTorch's float32 results are
#: then 27% (m) and 96% (l) of the largest value off its float64 results, and say nothing.
_GAINS = {"efficientnet_v2_m": 1.0, "efficientnet_v2_l": 1.0}

#: torchvision: (family, smallest first, image size).
_CLASSIFIERS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("alexnet", ("alexnet",), 64),
    ("convnext", ("convnext_tiny", "convnext_small", "convnext_base", "convnext_large"), 64),
    ("densenet", ("densenet121", "densenet169", "densenet201", "densenet161"), 64),
    ("efficientnet", tuple(f"efficientnet_b{i}" for i in range(8)), 64),
    ("efficientnet_v2", ("efficientnet_v2_s", "efficientnet_v2_m", "efficientnet_v2_l"), 64),
    ("googlenet", ("googlenet",), 64),
    ("inception_v3", ("inception_v3",), 96),
    ("maxvit", ("maxvit_t",), 224),
    ("mnasnet", ("mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "mnasnet1_3"), 64),
    ("mobilenet_v2", ("mobilenet_v2",), 64),
    ("mobilenet_v3", ("mobilenet_v3_small", "mobilenet_v3_large"), 64),
    ("regnet_x", tuple(f"regnet_x_{s}" for s in ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf")), 64),
    ("regnet_y", tuple(f"regnet_y_{s}" for s in ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf", "128gf")),
     64),
    ("resnet", ("resnet18", "resnet34"), 64),
    ("resnet50", ("resnet50", "resnet101", "resnet152", "wide_resnet50_2", "wide_resnet101_2"), 64),
    ("resnext", ("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"), 64),
    ("shufflenet_v2", tuple(f"shufflenet_v2_x{s}" for s in ("0_5", "1_0", "1_5", "2_0")), 64),
    ("squeezenet", ("squeezenet1_1", "squeezenet1_0"), 64),
    ("swin", ("swin_t", "swin_s", "swin_b"), 64),
    ("swin_v2", ("swin_v2_t", "swin_v2_s", "swin_v2_b"), 64),
    ("vgg", ("vgg11", "vgg13", "vgg16", "vgg19"), 32),
    ("vgg_bn", ("vgg11_bn", "vgg13_bn", "vgg16_bn", "vgg19_bn"), 32),
    ("vit", ("vit_b_32", "vit_b_16", "vit_l_32", "vit_l_16", "vit_h_14"), 224),
)  # fmt: skip

_SEGMENTATION = (
    "lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large", "fcn_resnet50", "deeplabv3_resnet50", "fcn_resnet101",
    "deeplabv3_resnet101",
)  # fmt: skip

_DETECTION = (
    "ssdlite320_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_320_fpn", "fasterrcnn_mobilenet_v3_large_fpn",
    "fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_fpn_v2", "retinanet_resnet50_fpn", "retinanet_resnet50_fpn_v2",
    "fcos_resnet50_fpn", "maskrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_v2", "keypointrcnn_resnet50_fpn",
    "ssd300_vgg16",
)  # fmt: skip

_TIMM: tuple[ZooModel, ...] = (
    _timm("resnet18"),
    _timm("resnetv2_50"),
    _timm("efficientnet_b0"),
    _timm("tf_efficientnetv2_b0"),
    _timm("convnext_atto"),
    _timm("convnextv2_atto"),
    _timm("vit_tiny_patch16_224", img_size=64, depth=3),
    _timm("deit_tiny_distilled_patch16_224", img_size=64, depth=3),
    _timm("swin_tiny_patch4_window7_224", 224, depths=(1, 1, 2, 1)),
    _timm("swinv2_tiny_window8_256", 256, depths=(1, 1, 2, 1)),
    _timm("mobilenetv3_small_100"),
    _timm("mobilenetv4_conv_small"),
    _timm("mobilenetv2_100"),
    _timm("regnetx_002"),
    _timm("regnety_002"),
    _timm("densenet121"),
    _timm("inception_v3", 96),
    _timm("inception_v4", 96),
    _timm("inception_resnet_v2", 96),
    _timm("inception_next_tiny"),
    _timm("xception41"),
    _timm("mixer_s32_224", 224),
    _timm("gmlp_ti16_224", 224),
    _timm("beit_base_patch16_224", img_size=64, depth=2),
    _timm("beitv2_base_patch16_224", img_size=64, depth=2),
    _timm("coat_lite_tiny", img_size=64),
    _timm("cait_xxs24_224", img_size=64, depth=3),
    _timm("maxvit_nano_rw_256", 256, depths=(1, 1, 1, 1)),
    _timm("coatnet_nano_rw_224", 224, depths=(1, 1, 1, 1)),
    _timm("efficientformer_l1", 224),
    _timm("efficientformerv2_s0", 224),
    _timm("edgenext_xx_small"),
    _timm("mobilevit_xxs"),
    _timm("mobilevitv2_050"),
    _timm("levit_128s", 224),
    _timm("poolformer_s12"),
    _timm("pvt_v2_b0"),
    _timm("twins_svt_small", 64),
    _timm("crossvit_tiny_240", 240, depth=((1, 1, 0), (1, 1, 0), (1, 1, 0))),
    _timm("xcit_nano_12_p16_224", img_size=64, depth=2),
    _timm("ghostnet_100"),
    _timm("hrnet_w18_small"),
    _timm("res2net50_26w_4s"),
    _timm("resnest14d"),
    _timm("seresnet50"),
    _timm("skresnet18"),
    _timm("dpn48b"),
    _timm("dla34"),
    _timm("cspresnet50"),
    _timm("cspdarknet53"),
    _timm("ese_vovnet19b_dw"),
    _timm("nfnet_f0"),
    _timm("nf_resnet50"),
    _timm("rexnet_100"),
    _timm("repvgg_a0"),
    _timm("repvit_m0_9"),
    _timm("fastvit_t8", 128),
    _timm("tiny_vit_5m_224", 224),
    _timm("volo_d1_224", 224),
    _timm("eva02_tiny_patch14_224", 224, depth=2),
    _timm("hiera_tiny_224", 224),
    _timm("focalnet_tiny_srf"),
    _timm("gcvit_xxtiny", 224),
    _timm("mvitv2_tiny", 224),
    _timm("davit_tiny", 224),
    _timm("nest_tiny", 224),
    _timm("pit_ti_224", 224),
    _timm("visformer_tiny", 224),
    _timm("convmixer_768_32"),
    _timm("tnt_s_patch16_224", 224),
    _timm("vgg11"),
    _timm("lcnet_050"),
    _timm("tinynet_e"),
    _timm("mnasnet_100"),
    _timm("fbnetc_100"),
    _timm("spnasnet_100"),
    _timm("mixnet_s"),
    _timm("hgnet_tiny"),
)

#: Further sizes and forms of the families of timm that are used most.
_TIMM_SIZES: tuple[ZooModel, ...] = (
    _timm("resnet34", family="resnet18"),
    _timm("resnet26d", family="resnet18"),
    _timm("resnet50", family="resnet18"),
    _timm("resnext50_32x4d", family="resnext"),
    _timm("ecaresnet26t", family="ecaresnet"),
    _timm("seresnext26d_32x4d", family="seresnet50"),
    _timm("resnetv2_50d", family="resnetv2"),
    _timm("res2net50_48w_2s", family="res2net50"),
    _timm("efficientnet_lite0"),
    _timm("efficientnet_b1"),
    _timm("efficientnet_es"),
    _timm("tf_efficientnet_b0", family="tf"),
    _timm("tf_efficientnetv2_b1"),
    _timm("mobilenetv2_050"),
    _timm("mobilenetv3_large_100"),
    _timm("mobilenetv4_conv_medium"),
    _timm("mobilenetv4_hybrid_medium"),
    _timm("convnext_femto"),
    _timm("convnext_tiny"),
    _timm("convnextv2_femto"),
    _timm("vit_small_patch16_224", img_size=64, depth=3),
    _timm("vit_base_patch32_224", 224, depth=2),
    _timm("vit_small_patch14_reg4_dinov2", 56, depth=2, img_size=56),
    _timm("deit3_small_patch16_224", family="deit", img_size=64, depth=3),
    _timm("swin_small_patch4_window7_224", 224, depths=(1, 1, 2, 1)),
    _timm("swinv2_small_window8_256", 256, depths=(1, 1, 2, 1)),
    _timm("regnetx_004"),
    _timm("regnety_004"),
    _timm("densenet169", family="densenet121"),
    _timm("mixer_b16_224", 224, num_blocks=3),
    _timm("vgg13_bn", family="vgg11"),
    _timm("eva02_small_patch14_224", 224, depth=2),
    _timm("ghostnetv2_100", family="ghostnet"),
    _timm("repvgg_b0"),
    _timm("mobilevit_xs"),
    _timm("mobilevitv2_075"),
    _timm("levit_192", 224),
    _timm("poolformerv2_s12", family="poolformer"),
    _timm("pvt_v2_b1"),
    _timm("cait_xxs36_224", img_size=64, depth=3),
    _timm("rexnet_130"),
    _timm("fastvit_s12", 128),
    _timm("dla46_c", family="dla34"),
    _timm("hrnet_w18_small_v2"),
    _timm("dpn68", family="dpn48b"),
    _timm("hgnet_small"),
    _timm("mixnet_m"),
    _timm("xception65", family="xception41"),
)

_BERT = dict(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
)
_LLAMA = dict(_BERT, num_key_value_heads=2, attn_implementation="eager")

_TRANSFORMERS: tuple[ZooModel, ...] = (
    _text("bert", "BertConfig", "BertModel", ("last_hidden_state", "pooler_output"), **_BERT),
    _text("gpt2", "GPT2Config", "GPT2LMHeadModel", ("logits",), vocab_size=100, n_positions=32, n_embd=32, n_layer=2,
          n_head=4),
    _text("vit", "ViTConfig", "ViTModel", ("last_hidden_state", "pooler_output"), hidden_size=32, num_hidden_layers=2,
          num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8),
    _text("llama", "LlamaConfig", "LlamaForCausalLM", ("logits",), **_LLAMA),
    _text("qwen2", "Qwen2Config", "Qwen2ForCausalLM", ("logits",), **_LLAMA),
    _text("mistral", "MistralConfig", "MistralForCausalLM", ("logits",), **_LLAMA),
    _text("distilbert", "DistilBertConfig", "DistilBertModel", ("last_hidden_state",), vocab_size=100, dim=32,
          n_layers=2, n_heads=4, hidden_dim=64),
    _text("roberta", "RobertaConfig", "RobertaModel", ("last_hidden_state",), **_BERT),
    _text("albert", "AlbertConfig", "AlbertModel", ("last_hidden_state",), **_BERT),
    _text("electra", "ElectraConfig", "ElectraModel", ("last_hidden_state",), **_BERT),
    _text("opt", "OPTConfig", "OPTForCausalLM", ("logits",), vocab_size=100, hidden_size=32, num_hidden_layers=2,
          num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=32),
)  # fmt: skip

#: Every network by ``package/name``.
ZOO: dict[str, ZooModel] = {
    f"{model.package}/{model.name}": model
    for model in (
        *(_vision(n, family, size) for family, names, size in _CLASSIFIERS for n in names),
        *(_vision(name, "segmentation", 64) for name in _SEGMENTATION),
        *(
            _vision(name, "detection", 300 if name == "ssd300_vgg16" else 128)
            for name in _DETECTION
        ),
        *_TIMM,
        *_TIMM_SIZES,
        *_TRANSFORMERS,
    )
}


def smallest_of_each_family() -> tuple[str, ...]:
    """The first network of every family, and every one of segmentation and detection."""
    seen: dict[tuple[str, str], str] = {}
    for key, model in ZOO.items():
        every = model.family in ("segmentation", "detection")
        seen.setdefault((model.package, key if every else model.family), key)
    return tuple(seen.values())
