"""What other engines say when they do not start, and what to do about it."""

from __future__ import annotations

import re

KNOWN: tuple[tuple[str, str], ...] = (  # what stands in a log, and what that means; the first that fits is told
    (
        r"operator torchvision::nms does not exist",
        "its torchvision was built for another torch: uninstall torchvision, torchaudio and torchcodec there.",
    ),
    (r"No module named ['\"]?arctic_inference", "suffix decoding needs `pip install arctic-inference` there."),
    (
        r"(CUDA out of memory|torch\.OutOfMemoryError|No available memory for the cache blocks|"
        r"Free memory on device .* less than desired|cudaMalloc failed: out of memory|failed to allocate .* buffer)",
        "memory does not suffice: fewer methods at a time, a smaller --max-model-len, --max-num-seqs or model.",
    ),
    (
        r"(estimated maximum model length is (\d+)|larger than the maximum number of tokens that can be stored in KV)",
        "its KV cache has no room for one text of that length: a smaller --max-model-len, or more memory.",
    ),
    (
        r"(User-specified max_model_len \(?\d+\)? is greater than the derived max_model_len)",
        "the model takes no texts of that length: a smaller --max-model-len.",
    ),
    (
        r"(MetadataIncompleteBuffer|HeaderTooLarge|InvalidHeader\w*|Error while deserializing header)",
        "a safetensors file of the model is cut off or damaged: fetch it again.",
    ),
    (
        r"(invalid magic characters|failed to read magic|tensor .* data is not within the file bounds)",
        "the GGUF file is cut off or damaged: fetch it again.",
    ),
    (
        r"(is not supported for quantization method (\w+)|Bfloat16 is only supported on GPUs with compute capability)",
        "the weights need another dtype here: --dtype float16.",
    ),
    (
        r"(quantization method \w+ is not supported for the current GPU\. Minimum capability: (\d+))",
        "this GPU is too old for how the weights are quantised: take another quantisation of the model.",
    ),
    (
        r"((?:method|type)[^\n]{0,80}(?:is not supported|not implemented|invalid choice|Unsupported speculative)|"
        r"Unknown speculative|unknown speculative type)",
        "this version has no such method of speculation: choose another, or a newer version.",
    ),
    (
        r"(Model architectures \[.*?\] are not supported|unknown model architecture)",
        "this version does not know the model's architecture: a newer version, or another model.",
    ),
    (
        r"(draft model.{0,60}vocab|vocab.{0,60}draft model|the target and draft models are not compatible)",
        "draft model and target have different vocabularies: choose a draft of the same family.",
    ),
    (r"(address already in use|Address in use)", "somebody else took its port meanwhile: try again."),
    (r"(gated repo|401 Client Error|Cannot access gated)", "the hub gives this model to those who asked for it only."),
    (
        r"(LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to .*huggingface)",
        "the model is not on this machine, and the hub cannot be reached: name a folder.",
    ),
    (r"No module named ['\"]?([\w.]+)", "the Python module {0} is missing there."),
)


def diagnose(log: str) -> str | None:
    """The cause and the remedy, where one is known."""
    for pattern, meaning in KNOWN:
        if found := re.search(pattern, log, re.IGNORECASE):
            return meaning.format(*found.groups())
    return None
