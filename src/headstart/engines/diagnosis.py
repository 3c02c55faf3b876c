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
        r"(?:Free|Available) memory on (?:device|node) .* less than|cudaMalloc failed: out of memory|"
        r"(?:failed|unable) to allocate .* buffer|DefaultCPUAllocator: can't allocate memory|std::bad_alloc|"
        r"ErrorOutOfDeviceMemory)",
        "memory does not suffice: a smaller --max-model-len, --max-num-seqs or model; in a benchmark, fewer methods at a time.",
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
        r"Cannot find any model weights with",
        "the folder has no weights in a form that it reads: take the model as safetensors.",
    ),
    (
        r"(There is no module or parameter named|Attempted to load (?:nested )?weight (?:\(|')|Tried to load weights of size|"
        r"weights were not initialized from checkpoint|size mismatch for |missing tensor '|wrong number of tensors|"
        r"tensor '.*' has wrong shape)",
        "the weights are not in the form that their config names: `headstart check` says more, or fetch the model again.",
    ),
    (
        r"Quantization method specified in the model config \(([\w-]+)\) does not match[^\n]*argument \(([\w-]+)\)",
        "the weights are quantised with {0}, and it is told {1}: leave out --quantization.",
    ),
    (
        r"(Unknown quantization method: ([\w-]+)|invalid ggml type|unknown ggml type)",
        "this version does not know how the weights are quantised: a newer version, or another quantisation.",
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
        r"(spec(?:ulati\w+)?[-_ ](?:decoding|method|type|config)[^\n]{0,80}(?:not supported|not implemented|invalid choice)|"
        r"\bmethod ['\"][\w-]+['\"] is not supported|(?:Unknown|Unsupported) speculative|"
        r"unknown speculative type|validation errors? for SpeculativeConfig\s+method)",
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
    (
        r"(?:unrecognized arguments|error: invalid argument): (\S+)",
        "this version has no option {0}: leave it out, or take a newer version.",
    ),
    (
        r"Timed out waiting for (?:new )?engine core processes",
        "loading took longer than vLLM waits for: set VLLM_ENGINE_READY_TIMEOUT_S to more seconds.",
    ),
    (
        r"(DistStoreError|client socket has timed out|connectFullMesh failed|waiting for clients\. \d+/\d+ clients joined|"
        r"NCCL error|ncclSystemError|ncclRemoteError|Barrier timed out)",
        "the machines, or their GPUs, did not find each other: the same --nnodes, --master-addr and --master-port on each, "
        "ports that are open between them, and all started within some minutes.",
    ),
    (r"Failed to import Ray", "--distributed-executor-backend ray needs `pip install ray` there."),
    (
        r"(Cannot provide a placement group|Could not find any running Ray instance|Ray is not initialized)",
        "Ray has not as many GPUs as --tensor-parallel-size times --pipeline-parallel-size: `ray status` tells what it has.",
    ),
    (
        r"World size \((\d+)\) is larger than the number of available GPUs \((\d+)\)",
        "{0} GPUs are asked for, and there are {1} here: a smaller --tensor-parallel-size, or --nnodes.",
    ),
    (
        r"PackageNotFoundError: No package metadata was found for vllm",
        "vLLM's package for CPUs has no command, and a machine of a rank above 0 needs it.",
    ),
    (
        r"(address already in use|Address in use|couldn't bind HTTP server socket)",
        "somebody else took its port meanwhile: try again.",
    ),
    (r"(gated repo|401 Client Error|Cannot access gated)", "the hub gives this model to those who asked for it only."),
    (
        r"(LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to .*huggingface)",
        "the model is not on this machine, and the hub cannot be reached: name a folder.",
    ),
    (r"No module named ['\"]?([\w.]+)", "the Python module {0} is missing there."),
)

LAST = 60  # lines of a log in which the cause stands, mostly


def diagnose(log: str) -> str | None:
    """The cause and the remedy, where one is known."""
    last = "\n".join(log.splitlines()[-LAST:])  # before that stand warnings, which did not end it
    for text in (last, log):
        for pattern, meaning in KNOWN:
            if found := re.search(pattern, text, re.IGNORECASE):
                return meaning.format(*found.groups())
    return None
