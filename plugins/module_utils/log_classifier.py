# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a log says went wrong: text -> classes with evidence and remedy, the root cause before what follows from it.

The rules are data: RULES is read from top to bottom, a line belongs to the first rule that matches it. Lines of level INFO,
DEBUG and WARNING tell of many errors that did not happen; only a `quiet` rule looks at them.
Sources: public reports of these faults on GB10, and logs of vLLM 0.19 to 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypedDict

from .problems import Problem, problem
from .vllm_log import Line, is_progress, mask, parse, split

EVIDENCE_LENGTH = 400
# Some lines quote whole configurations; what a rule looks for stands at the beginning.
LINE_LENGTH = 1500

# "class" is a keyword, hence the functional form.
Diagnosis = TypedDict("Diagnosis", {"class": str, "evidence": str, "remedy": str, "retryable": bool})


class Rank(IntEnum):
    """How near the root a class is. Lower ranks make higher ones superfluous, as marked."""

    CAUSE = 0
    SILENT = 1  # the server comes up and is wrong: reported along with causes
    LIKELY = 2  # a cause, unless a CAUSE explains it
    GENERIC = 3  # an exception that no rule knows
    CONSEQUENCE = 4  # says only that something died before


@dataclass(frozen=True)
class Rule:
    """pattern: of the line; also: must be somewhere in the log too; unless, within: must not be in the log, in the line;
    context: how many of the following lines belong to the evidence; retryable: starting again may be enough."""

    name: str
    pattern: re.Pattern[str]
    remedy: str
    rank: Rank = Rank.CAUSE
    retryable: bool = False
    quiet: bool = False
    also: re.Pattern[str] | None = None
    unless: re.Pattern[str] | None = None
    within: re.Pattern[str] | None = None
    context: int = 0


def _re(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.I)


_BUILDING = _re(r"\bninja\b|cc1plus|cicc|ptxas|nvcc|Building wheel|docker build|^#\d+ |^\[\d+/\d+\]")
_OVERRIDES = "vllm_recipe_overrides: {{engine_args: {{{0}}}}}".format
_REBUILD = "build the image again (playbooks/image.yml)"
_CHECKPOINT = "run playbooks/checkpoint.yml: it completes what is missing and checks every file"
_CACHES = "TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR and VLLM_CACHE_ROOT"

RULES: tuple[Rule, ...] = (
    # --- toolchain and binaries -------------------------------------------------------------------------------------------
    Rule(
        "ptxas_old",
        _re(r"ptxas\b.*(is not defined for option|Unsupported \.version|unsupported gpu)|nvcc fatal\s*:\s*Unsupported gpu architecture"),
        "the ptxas in use is older than this GPU (sm_121 needs CUDA 13 or newer): set TRITON_PTXAS_PATH to a CUDA >= 13 ptxas, e.g."
        " /usr/local/cuda/bin/ptxas in the recipe's environment; TRITON_OVERRIDE_ARCH is no cure",
    ),
    Rule(
        "torch_abi",
        _re(r"undefined symbol: \S*(?:2at\d|3c10|5torch|aoti_torch|THP)\S*"),
        "the extension was built against another torch or CUDA version than the installed one: build vLLM with the very torch and CUDA tag"
        f" of the image, or {_REBUILD}",
        quiet=True,
    ),
    Rule(
        "library_abi",
        _re(r"(?:ImportError|OSError|symbol lookup error)\b.*undefined symbol: \S+"),
        f"two libraries of the image do not fit each other: {_REBUILD}",
    ),
    Rule(
        "torch_cpu",
        _re(r"libtorch_cuda\.so: cannot open shared object file|Torch not compiled with CUDA enabled"),
        f"a CPU build of torch is installed, mostly because an unpinned package replaced it: pin torch with its +cu13x tag and {_REBUILD}",
        quiet=True,
    ),
    Rule(
        "cuda_runtime_missing",
        _re(r"lib(?:cudart|cublas\w*|cudnn\w*|cusparse\w*|nvrtc\w*|nccl)\.so(?:\.\d+)*: cannot open shared object file"),
        f"a wheel made for another CUDA release is in the image: {_REBUILD} with one CUDA tag for torch, vLLM and flashinfer",
        quiet=True,
    ),
    Rule(
        "cutlass_kernel",
        _re(r"This kernel only supports sm_?\d+|cutlass_gemm_caller\b.*Error Internal|Int8 not supported on SM_?\d+"),
        "this CUTLASS kernel does not run on SM121: set VLLM_DISABLED_KERNELS=CutlassFp8BlockScaledMMKernel in the recipe's environment",
    ),
    Rule(
        "backend_unsupported",
        _re(
            r"does not support backend '?[\w-]+'? with capability|Assertion error\b.*Unknown recipe"
            r"|capability \(?12[., ]*1\)? is not supported"
        ),
        "the chosen backend has no kernels for capability 12.1: choose another attention-backend or MoE backend in engine_args, and"
        " VLLM_USE_DEEP_GEMM=0 in environment where DeepGEMM is named",
        within=_re(r"fall(?:ing)? ?back|fallback"),
    ),
    Rule(
        "kernel_arch",
        _re(r"no kernel image is available for execution on the device"),
        f"the extension was not compiled for this GPU: set TORCH_CUDA_ARCH_LIST=12.1a in the image profile and {_REBUILD}",
    ),
    Rule(
        "kernel_shared_memory",
        _re(r"out of resources?: shared memory, Required: \d+"),
        "a Triton kernel asks for more shared memory than GB10 has: use smaller blocks or fewer stages, or another backend",
    ),
    Rule(
        "stream_capture",
        _re(r"operation not permitted when stream is capturing"),
        "a kernel was compiled or tuned inside graph capture: warm it up before, for each batch size, or set enforce-eager: true",
    ),
    Rule(
        "no_cxx_compiler",
        _re(r"InvalidCxxCompiler|No working C\+\+ compiler|\b(?:g|c)\+\+: (?:command )?not found|No such file or directory: '(?:g|c)\+\+'"),
        "torch.compile wants a C++ compiler when the first request comes: set TORCHDYNAMO_DISABLE=1 in the recipe's environment, or put g++"
        " into the image",
    ),
    Rule(
        "python_headers_missing",
        _re(r"\bPython\.h: No such file"),
        "Triton compiles a launcher in C and misses Python's headers: install python3-dev (pythonX.Y-dev of the interpreter in use)",
    ),
    Rule(
        "no_c_compiler",
        _re(
            r"Failed to find C compiler|No such file or directory: '(?:\S*/)?(?:gcc|cc|clang|nvcc|ninja)'|\bgcc: (?:command )?not found"
            r"|Could not find nvcc|Ninja is required to load C\+\+ extensions"
        ),
        "kernels are compiled at run time and the compiler is missing: install gcc and python3-dev, and what else the line names",
    ),
    Rule(
        "cache_corrupt",
        _re(r"Unknown key: 'cubin'|KeyError: 'cubin'|FileNotFoundError\b.*(?:/\.?triton/|torchinductor)\S*"),
        "an entry of the kernel cache is broken, e.g. written by two processes at once: stop the instance, remove its cache, start it",
        retryable=True,
    ),
    Rule(
        "cache_not_writable",
        _re(
            r"(?:Permission denied|Read-only file system)\b.*?'?/[^\s']*"
            r"(?:triton|\.cache|/cache|inductor|flashinfer|\.vllm|\.nv\b|\.config)"
            r"|cannot create directory .?/[^\s']*(?:triton|cache|inductor|flashinfer)\S*: (?:Permission denied|Read-only)"
        ),
        f"kernels are compiled into a folder that cannot be written (HOME unset or read-only): let {_CACHES} point to a writable mount",
    ),
    # --- memory -----------------------------------------------------------------------------------------------------------
    Rule(
        "gpu_memory_low",
        _re(
            r"Free memory on device(?: \S+)? \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired"
            r" GPU memory utilization \((?P<util>[\d.]+), (?P<want>[\d.]+) GiB\)"
        ),
        "another process, the page cache or memory left by a crashed start holds the rest: end it (docker ps, nvidia-smi), drop the page"
        " cache, after repeated failed starts reboot; or ask for less, "
        + _OVERRIDES("gpu-memory-utilization: {fits}")
        + "; do not let it restart in a loop",
    ),
    Rule(
        "kv_cache_small",
        _re(r"KV cache is needed, which is larger than the available KV cache memory|No available memory for the cache blocks"),
        "what the weights leave does not hold one full context: lower max-model-len, compress the cache (kv-cache-dtype), or raise"
        " gpu-memory-utilization if memory is free",
    ),
    Rule(
        "shm_small",
        _re(
            r"(?:Insufficient|not enough) space in /dev/shm|posix_fallocate failed|/dev/shm\S*: No space"
            r"|unable to (?:open|mmap|allocate) shared memory"
        ),
        "shared memory is too small: run the container with --ipc host on a node whose /dev/shm is large enough, or give it --shm-size 4g",
    ),
    Rule(
        "gpu_oom",
        _re(
            r"CUDA out of memory|OutOfMemoryError|NV_ERR_NO_MEMORY|CUDA error: out of memory"
            r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
        ),
        "lower gpu-memory-utilization, max-num-seqs or max-model-len; end other users of the memory; a GPU that a crashed start left full"
        " needs a reboot",
    ),
    Rule(
        "build_oom",
        _re(
            r"fatal error: Killed signal terminated program|(?:non-zero code:|did not complete successfully: exit code:) 137\b"
            r"|(?:cc1plus|cicc|ptxas|nvcc|ninja)\b.*\bKilled\b"
        ),
        "compiling took more memory than the node has: lower MAX_JOBS (one job for each 8 GiB of available memory), and stop the served"
        " model while building",
    ),
    Rule(
        "build_oom",
        _re(r"^\s*(?:\S+ )?Killed\s*$|(?:exit(?:ed with)?|status|code:?) 137\b"),
        "compiling took more memory than the node has: lower MAX_JOBS (one job for each 8 GiB of available memory), and stop the served"
        " model while building",
        also=_BUILDING,
    ),
    Rule(
        "oom_killed",
        _re(r"killed by the OOM killer|result 'oom-kill'|Out of memory: Killed process|oom-kill:|invoked oom-killer"),
        "the kernel ran out of memory and killed the server: lower gpu-memory-utilization, drop the page cache before the start, end other"
        " users of the memory",
        quiet=True,
    ),
    Rule(
        "build_failed",
        _re(r"ninja: build stopped|error: command '\S*(?:gcc|g\+\+|nvcc|cc|ninja)\S*' failed|Failed building wheel for"),
        "the compiler's first error above this line is the cause",
        rank=Rank.LIKELY,
    ),
    # --- Docker and the node ----------------------------------------------------------------------------------------------
    Rule(
        "toolkit_not_configured",
        _re(
            r"could not select device driver|unknown or invalid runtime name: nvidia|unresolvable CDI devices|nvidia-container-cli: \S+"
            r"|nvidia-container-runtime\b.*(?:not found|no such file)"
        ),
        "Docker does not know the NVIDIA runtime: install nvidia-container-toolkit, run `nvidia-ctk runtime configure --runtime=docker` and"
        " restart Docker",
    ),
    Rule(
        "gpu_lost",
        _re(
            r"Failed to initialize NVML: Unknown Error|CUDA error: (?:unknown error|no CUDA-capable device)|GPU is lost|fallen off the bus"
        ),
        "the running container has lost its GPU, as after `systemctl daemon-reload`: start the instance again; reboot if it stays",
        retryable=True,
    ),
    Rule(
        "no_gpu",
        _re(
            r"Failed to infer device type|Found no NVIDIA driver|no CUDA-capable device is detected|CUDA driver version is insufficient"
            r"|Failed to initialize NVML: (?:Driver|Insufficient)|system not yet initialized|forward compatibility was attempted"
        ),
        "the container sees no usable GPU: check nvidia-smi on the node, that the unit passes --gpus all, and that the driver is new enough"
        " for the image's CUDA",
    ),
    Rule(
        "docker_group",
        _re(r"permission denied while trying to connect to the Docker (?:daemon|API)"),
        "this user may not use Docker: run with become, or add the user to the docker group and connect anew (a session that is open,"
        " also a multiplexed SSH one, does not see the new group)",
    ),
    Rule(
        "docker_down",
        _re(r"Cannot connect to the Docker daemon|Is the docker daemon running|failed to connect to the docker API"),
        "the Docker engine is not running: `systemctl start docker`, `journalctl -u docker` says why it ended",
        retryable=True,
    ),
    Rule(
        "device_missing",
        _re(r"error gathering device information while adding custom device"),
        "the device that the unit passes to the container is not on this node: load its driver, or do not pass it",
    ),
    Rule(
        "memlock_not_permitted",
        _re(r"error setting rlimit type 8|rlimits?\b.*memlock.*(?:not permitted|operation not permitted)"),
        "this node may not raise the memory lock limit (no CAP_SYS_RESOURCE, as inside a container): leave vllm_service_memlock empty",
    ),
    Rule(
        "memlock_small",
        _re(r"set max locked memory|RLIMIT_MEMLOCK is \d+ bytes|ibv_(?:reg_mr\w*|create_[cq]\w*)\b.*Cannot allocate memory"),
        "RDMA needs locked memory: --ulimit memlock=-1 for the container, LimitMEMLOCK=infinity in a unit",
        quiet=True,
    ),
    Rule(
        "image_missing",
        _re(r"No such image|Unable to find image|pull access denied|manifest (?:unknown|for \S+ not found)"),
        "the image is not on this node: run playbooks/image.yml",
    ),
    Rule(
        "wrong_architecture",
        _re(r"exec format error|does not match the (?:detected|specified) (?:host )?platform"),
        "the image is for another processor architecture (a Spark is arm64): build it on the node",
    ),
    Rule(
        "container_name_taken",
        _re(r"container name \S+ is already in use"),
        "a container of that name was left behind: `docker rm -f` it and start the unit again",
        retryable=True,
    ),
    Rule(
        "disk_full",
        _re(r"No space left on device|Disk quota exceeded|\[Errno 28\]|\bENOSPC\b"),
        "the disk of the path in this line is full (Docker's data-root while an image is loaded, which needs twice its size; the peer when"
        " rsync's receiver says so): free space, `docker builder prune`, and run again",
    ),
    Rule(
        "package_lock",
        _re(r"Could not get lock /var/lib/(?:dpkg|apt)\S*|Unable to acquire the dpkg frontend lock"),
        "another package manager is at work, mostly unattended-upgrades after boot: wait for it, or set a lock timeout",
        retryable=True,
        quiet=True,
    ),
    Rule(
        "externally_managed",
        _re(r"externally-managed-environment"),
        "this Python belongs to the distribution: install into a virtual environment",
    ),
    Rule(
        "port_in_use",
        _re(r"address already in use|\[Errno 98\]|\bEADDRINUSE\b|port is already allocated"),
        "another process listens on the port, e.g. an instance that was left running: `ss -ltnp` names it; stop it or set vllm_port",
    ),
    Rule(
        "dns",
        _re(r"Temporary failure in name resolution|Could not resolve host|Name or service not known"),
        "the node cannot resolve a name: check DNS; an instance that has its checkpoint needs none, HF_HUB_OFFLINE=1",
        retryable=True,
    ),
    # --- the checkpoint ---------------------------------------------------------------------------------------------------
    Rule(
        "missing_shard",
        _re(r"Weight files referenced in index but missing|No such file or directory: \S*\.safetensors|Cannot find any model weights"),
        f"a weight file that the index names is not there: {_CHECKPOINT}",
    ),
    Rule(
        "broken_shard",
        _re(
            r"SafetensorError\b.*(?:header|metadata)|incomplete metadata, file not fully covered|MetadataIncompleteBuffer|InvalidHeader\w*"
            r"|Header(?:TooLarge|TooSmall)|Error while deserializing header"
        ),
        f"a weight file is cut short or no safetensors file at all: {_CHECKPOINT}",
    ),
    Rule(
        "mtp_not_loaded",
        _re(r"Following weights were not initialized from checkpoint: .*(?:pre_fc_norm|mtp\.)"),
        "the draft found no MTP weights, since the index does not list them: set checkpoint.mtp: true in the recipe and run"
        " playbooks/checkpoint.yml, which lists every tensor that is on disk",
    ),
    Rule(
        "weights_not_initialized",
        _re(r"Following weights were not initialized from checkpoint"),
        f"the checkpoint lacks these tensors: {_CHECKPOINT}",
    ),
    Rule(
        "weight_skipped",
        _re(r"Parameter (?P<name>\S+) not found in params_dict, skip loading"),
        "the server comes up without these weights and answers nonsense: the image's quantisation plugin does not fit the checkpoint; use"
        " the recipe's image profile, and check that each F8_E4M3 weight has its weight_scale_inv",
        rank=Rank.SILENT,
        quiet=True,
    ),
    Rule(
        "quantized_lm_head",
        _re(r"There is no module or parameter named '\S*lm_head\.\w+'"),
        "the checkpoint holds a quantised lm_head that its config does not list as quantised: add lm_head to the quantisation config, or"
        " use a checkpoint with a plain head",
    ),
    Rule(
        "unknown_tensor",
        _re(r"There is no module or parameter named '(?P<name>[^']*)'"),
        "the checkpoint holds a tensor that this model class does not know: the vLLM version or the quantisation config does not fit it",
    ),
    Rule(
        "tensor_shape",
        _re(r"Attempted to load weight \(.*\) into parameter|size mismatch for \S+"),
        "a tensor has another shape than the model's config says: config.json and the weights belong to different revisions; "
        + _CHECKPOINT,
    ),
    Rule(
        "tokenizer_class",
        _re(r"Tokenizer class \S+ does not exist|Couldn't instantiate the backend tokenizer|Can't load tokenizer for"),
        "the tokenizer files are missing or newer than the image's transformers: complete the checkpoint, or build the image with a newer"
        " transformers",
    ),
    Rule(
        "architecture_unknown",
        _re(
            r"Transformers does not recognize this architecture|Model architectures \[.*\] (?:are not supported|failed to be inspected)"
            r"|has no vLLM implementation"
        ),
        "the image's vLLM or transformers is too old for this model: choose an image profile that supports it",
    ),
    Rule(
        "gated_not_granted",
        _re(r"awaiting a review from the repo authors|403 Client Error|not in the authorized list"),
        "the token's account has not been granted this repository: ask for access on its page",
    ),
    Rule(
        "gated_no_token",
        _re(r"access a gated repo|Cannot access gated repo|401 Client Error|Invalid (?:user ?name or password|credentials)"),
        "the repository wants a token of an account that has access to it",
    ),
    Rule(
        "repository_not_found",
        _re(r"Repository Not Found|RevisionNotFound|404 Client Error"),
        "there is no such repository or revision, or it is private: check checkpoint.repo and checkpoint.revision",
    ),
    Rule(
        "model_folder",
        _re(
            r"Repo id must be in the form|Invalid repository ID or local directory|does not appear to have a file named config\.json"
            r"|OfflineModeIsEnabled|LocalEntryNotFound|Cannot find an appropriate cached snapshot"
        ),
        f"the model folder is not there or incomplete inside the container: {_CHECKPOINT}, and check the unit's mount of /model",
    ),
    # --- arguments --------------------------------------------------------------------------------------------------------
    Rule(
        "unknown_parser",
        _re(
            r"invalid (?:tool call|reasoning) parser|(?:reasoning|tool)[ _]parser\S* .*(?:not found|(?:has|is) not (?:been )?registered)"
            r"|parser_name=\S+ has not been registered|--enable-auto-tool-choice requires --tool-call-parser"
        ),
        "the parser's name is not one of this vLLM version: choose tool-call-parser and reasoning-parser from the names in this line",
    ),
    Rule(
        "bad_argument",
        _re(r"^(?:vllm|vllm serve|api_server\.py): error: .*|unrecognized arguments: "),
        "this vLLM version does not take the argument: correct the recipe's engine_args, or use the image profile that the recipe is for",
    ),
    Rule(
        "bad_config",
        _re(
            r"\d+ validation errors? for \w+|Unknown attention backend|Load format .* is not supported|Unknown quantization method"
            r"|Invalid data-parallel launch options|VLLM_ALLOW_LONG_MAX_MODEL_LEN"
        ),
        "vLLM refuses this value: correct the recipe's engine_args",
        context=2,
    ),
    Rule(
        "prefix_caching_hybrid",
        _re(r"precopy_mamba\w*|mamba_utils\.py.*run_fused_precopy"),
        "prefix caching does not work with this hybrid (linear attention) model: " + _OVERRIDES("enable-prefix-caching: false"),
        context=2,
    ),
    Rule(
        "prefix_caching_hybrid",
        _re(r"TypeError: 'function' object is not subscriptable"),
        "prefix caching does not work with this hybrid (linear attention) model: " + _OVERRIDES("enable-prefix-caching: false"),
        also=_re(r"\bmamba_utils\b"),
    ),
    Rule(
        "plugin_not_loaded",
        _re(r"Failed to load plugin (?P<name>\S+)"),
        f"vLLM goes on without the plugin: {_REBUILD}, its traceback follows this line in the log",
        rank=Rank.SILENT,
        quiet=True,
    ),
    # --- several processes and nodes --------------------------------------------------------------------------------------
    Rule(
        "socket_fallback",
        _re(r"NET/IB : No device found"),
        "NCCL found no RDMA device and uses TCP: pass /dev/infiniband and IPC_LOCK to the container on the host's network, and set"
        " NCCL_NET=IB, so that it stops instead",
        rank=Rank.SILENT,
        quiet=True,
        also=_re(r"Using network Socket"),
        unless=_re(r"world_size=1 rank=0"),
    ),
    Rule(
        "nccl_no_network",
        _re(r"Failed to initialize any NET plugin"),
        "NCCL finds no usable RDMA device (NCCL_NET=IB forbids TCP): check the cable, /dev/infiniband in the container and NCCL_IB_HCA",
        quiet=True,
    ),
    Rule(
        "rendezvous_timeout",
        _re(r"DistStoreError\b.*|Timed out after \d+ seconds waiting for clients"),
        "the other rank did not come: start both, with the same master address, and let no firewall stand between them",
        retryable=True,
    ),
    Rule(
        "semaphores_removed",
        _re(r"SemLock\._rebuild"),
        "logind removed the user's semaphores when an SSH session ended (RemoveIPC): run the server as a system unit, or enable lingering",
        retryable=True,
    ),
    Rule(
        "rank_timeout",
        _re(r"RPC call to \w+ timed out"),
        "the other rank does not answer: look at its log and at the link between the nodes; stop and start both",
        rank=Rank.LIKELY,
        retryable=True,
    ),
    Rule(
        "peer_lost",
        _re(r"(?:gloo|ProcessGroup|\bNCCL\b|TCPStore).*(?:closed|reset) by peer"),
        "the other rank is gone: its log holds the cause; stop and start both",
        rank=Rank.LIKELY,
        retryable=True,
    ),
    Rule(
        "cuda_fault",
        _re(
            r"CUDA error: (?!out of memory)\S.*|illegal memory access|device-side assert|cudaError(?!MemoryAllocation)\w+"
            r"|Triton Error \[CUDA\]"
        ),
        "a kernel failed: try another attention-backend or enforce-eager: true; the first traceback names the kernel",
        rank=Rank.LIKELY,
    ),
    Rule(
        "too_many_files",
        _re(r"\[Errno 24\]|Too many open files"),
        "raise the limit of open files: --ulimit nofile=1048576 for the container",
        rank=Rank.LIKELY,
    ),
    Rule(
        "permission_denied",
        _re(r"PermissionError: .*|\[Errno 13\] Permission denied"),
        "the process may not use this path: correct its owner and mode, or mount it writable",
        rank=Rank.LIKELY,
    ),
    Rule(
        "module_missing",
        _re(r"ModuleNotFoundError: No module named \S+"),
        f"a Python package is missing in the image: {_REBUILD}",
        rank=Rank.LIKELY,
    ),
    Rule(
        "library_missing",
        _re(r"\S+\.so[\d.]*: cannot open shared object file"),
        f"a shared library is missing in the image: {_REBUILD}",
        rank=Rank.LIKELY,
    ),
    Rule(
        "docker_error",
        _re(r"^docker: .*|Error response from daemon: .*|OCI runtime create failed"),
        "Docker refused to run the container; the message says why",
        rank=Rank.LIKELY,
    ),
    Rule(
        "worker_killed",
        _re(r"died unexpectedly \(exit code: -?\d+\)|Bus error|Segmentation fault|\bcore dumped\b|status=(?:137|9/KILL)|^\s*Killed\s*$"),
        "a process of the server was killed or crashed: `dmesg` tells whether the kernel's out-of-memory killer did it",
        rank=Rank.LIKELY,
        quiet=True,
    ),
    # --- what only follows ------------------------------------------------------------------------------------------------
    Rule(
        "engine_died",
        _re(
            r"Engine core initialization failed|EngineCore (?:failed to start|encountered)|Engine(?:Dead|Core)\w*Error"
            r"|Engine process failed|WorkerProc (?:initialization )?(?:failed|hit an exception)|See (?:root cause|stack trace)"
            r"|Worker failed with error|Executor failed"
        ),
        "an earlier line holds the cause: `journalctl -u UNIT`, look for the first traceback",
        rank=Rank.CONSEQUENCE,
    ),
    Rule(
        "restart_loop",
        _re(r"Start request repeated too quickly|result 'start-limit-hit'"),
        "the service failed several times in a row; each start's log holds the cause. After mending it: `systemctl reset-failed`",
        rank=Rank.CONSEQUENCE,
        quiet=True,
    ),
)

# The last line of a traceback: "ValueError: text", "torch.foo.BarError: text"; its frames and notes do not match.
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Failure|Timeout)\b(?:: .*)?$")
_UNKNOWN = Rule(
    "python_error",
    _EXCEPTION,
    "no known fault; this is the first exception, and the traceback above it in the log holds the details",
    rank=Rank.GENERIC,
)
# Exceptions of processes that are told to end; never the cause of anything.
_TEARDOWN = _re(r"^(?:\S+\.)?(?:KeyboardInterrupt|SystemExit|CancelledError|BrokenPipeError|EngineDeadError)\b")


@dataclass
class _Finding:
    rule: Rule
    line: int
    evidence: str
    values: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int]:
        return self.rule.rank, self.line


def util_max(free_gib: float, total_gib: float) -> float:
    """The largest gpu-memory-utilization, in hundredths, that free memory of total memory allows."""
    return int(100 * free_gib / total_gib + 1e-9) / 100 if total_gib > 0 else 0.0


def diagnose(text: str) -> list[Diagnosis]:
    """What went wrong, the root cause first; [] if the log shows nothing that has. One entry for each class, with its first line."""
    lines = [parse(raw[:LINE_LENGTH]) for raw in split(text) if is_progress(raw)]
    found: dict[str, _Finding] = {}
    for number, line in enumerate(lines):
        finding = _match(text, lines, number, line)
        if finding is not None and finding.rule.name not in found:
            found[finding.rule.name] = finding
    kept = _without_followers(sorted(found.values(), key=lambda f: f.key))
    return [_diagnosis(finding) for finding in kept]


def silent(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Those that make a server that comes up a wrong one."""
    names = {rule.name for rule in RULES if rule.rank == Rank.SILENT}
    return [d for d in diagnoses if d["class"] in names]


def as_problems(diagnoses: Iterable[Diagnosis]) -> list[Problem]:
    """Diagnoses as problems, all of them errors."""
    return [problem(d["class"], d["evidence"], d["remedy"]) for d in diagnoses]


def _match(text: str, lines: list[Line], number: int, line: Line) -> _Finding | None:
    loud = line.level in ("", "ERROR", "CRITICAL")
    for rule in RULES:
        if not (loud or rule.quiet):
            continue
        match = rule.pattern.search(line.text)
        if match is None or (rule.within and rule.within.search(line.text)):
            continue
        if (rule.also and not rule.also.search(text)) or (rule.unless and rule.unless.search(text)):
            continue
        following = [extra.text.strip() for extra in lines[number + 1 : number + 1 + rule.context]]
        return _Finding(rule, number, " | ".join([line.text.strip(), *following]), match.groupdict())
    if loud and _EXCEPTION.match(line.text.strip()) and not _TEARDOWN.search(line.text):
        return _Finding(_UNKNOWN, number, line.text.strip())
    return None


def _without_followers(findings: list[_Finding]) -> list[_Finding]:
    """Leave out what a better explanation makes superfluous."""
    ranks = {finding.rule.rank for finding in findings}
    limit = Rank.CONSEQUENCE
    if Rank.CAUSE in ranks:
        limit = Rank.SILENT
    elif Rank.LIKELY in ranks:
        limit = Rank.LIKELY
    elif Rank.GENERIC in ranks:
        limit = Rank.GENERIC
    return [finding for finding in findings if finding.rule.rank <= limit]


def _diagnosis(finding: _Finding) -> Diagnosis:
    values = dict(finding.values)
    if finding.rule.name == "gpu_memory_low":
        values["fits"] = f"{util_max(float(values['free']), float(values['total'])):.2f}"
    evidence = finding.evidence if len(finding.evidence) <= EVIDENCE_LENGTH else finding.evidence[: EVIDENCE_LENGTH - 3] + "..."
    return {
        "class": finding.rule.name,
        "evidence": mask(evidence),
        "remedy": _filled(finding.rule.remedy, values),
        "retryable": finding.rule.retryable,
    }


def _filled(remedy: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        remedy = remedy.replace("{" + name + "}", value or "")
    return remedy
