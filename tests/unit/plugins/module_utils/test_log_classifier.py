# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Log lines -> classes: what was reported, in other words too, and what must not alarm anybody."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.log_classifier import RULES, as_problems, diagnose, silent, util_max

FIXTURES = Path(__file__).parents[3] / "fixtures/vllm"
E = "(EngineCore pid=9) ERROR 11-29 20:50:39 [core.py:1512] "
W = "(Worker pid=10) ERROR 11-29 20:50:39 [multiproc_executor.py:1063] "

FAULTS = [
    ("ptxas_old", "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"),
    ("ptxas_old", E + "ptxas fatal : Value 'sm_121' is not defined for option 'gpu-name'"),
    ("ptxas_old", "nvcc fatal   : Unsupported gpu architecture 'compute_121a'"),
    ("ptxas_old", "ptxas /tmp/x.ptx, line 5; fatal   : Unsupported .version 8.8; current version is '8.5'"),
    ("torch_abi", "ImportError: /x/vllm/_C.abi3.so: undefined symbol: _ZN2at4cuda24getCurrentCUDABlasHandleEv"),
    ("torch_abi", "OSError: /y/libfoo.so: undefined symbol: _ZN3c1013MessageLoggerC1EPKciib"),
    (
        "torch_abi",
        "WARNING 11-29 20:30:57 [i.py:1] Failed to import from vllm._C: ImportError('/x/_C.abi3.so: undefined symbol: _ZNK3c1010Y')",
    ),
    ("library_abi", "ImportError: /x/libnvshmem.so: undefined symbol: cuGreenCtxCreate"),
    ("torch_cpu", "ImportError: libtorch_cuda.so: cannot open shared object file: No such file or directory"),
    ("torch_cpu", "AssertionError: Torch not compiled with CUDA enabled"),
    ("cuda_runtime_missing", "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"),
    ("cuda_runtime_missing", "OSError: libcublasLt.so.13: cannot open shared object file: No such file or directory"),
    ("kernel_arch", "RuntimeError: CUDA error: no kernel image is available for execution on the device"),
    ("cutlass_kernel", "This kernel only supports sm120"),
    ("cutlass_kernel", "RuntimeError: cutlass_gemm_caller, /src/c3x/cutlass_gemm_caller.cuh:61, Error Internal"),
    ("cutlass_kernel", "NotImplementedError: Int8 not supported on SM121, use FP8"),
    ("backend_unsupported", "ValueError: flashinfer does not support backend 'trtllm' with capability 121"),
    ("backend_unsupported", "RuntimeError: Assertion error (csrc/apis/../jit/layout.hpp:53): Unknown recipe"),
    (
        "gpu_memory_low",
        "ValueError: Free memory on device cuda:0 (36.75/121.63 GiB) on startup is less than desired GPU memory utilization"
        " (0.85, 103.38 GiB). Decrease GPU memory utilization",
    ),
    (
        "gpu_memory_low",
        E + "ValueError: Free memory on device (101.5/121.69 GiB) on startup is less than desired GPU memory utilization (0.9, 109.5 GiB).",
    ),
    ("gpu_oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    ("gpu_oom", "RuntimeError: NV_ERR_NO_MEMORY returned by rm_alloc"),
    (
        "kv_cache_small",
        "ValueError: To serve at least one request with the model's max seq len (262144), 9.0 GiB KV cache is needed, which is larger than"
        " the available KV cache memory (3.1 GiB).",
    ),
    ("kv_cache_small", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    ("shm_small", "RuntimeError: Insufficient space in /dev/shm for shared-memory allocation: 160 MiB required, 64 MiB free."),
    ("shm_small", "misc/shmutils.cc:87 NCCL WARN posix_fallocate failed : No space left on device"),
    ("build_oom", "c++: fatal error: Killed signal terminated program cc1plus"),
    ("build_oom", "[12/90] Building CUDA object\nKilled\nninja: build stopped: subcommand failed."),
    ("build_oom", 'ERROR: process "/bin/sh -c pip wheel ." did not complete successfully: exit code: 137'),
    ("build_oom", "The command '/bin/sh -c make' returned a non-zero code: 137"),
    ("build_oom", "FAILED: x.o\nninja: build stopped\nmake exited with 137"),
    ("build_failed", "x.cu(3): error: expected a ;\nninja: build stopped: subcommand failed."),
    ("toolkit_not_configured", 'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].'),
    ("toolkit_not_configured", "docker: Error response from daemon: unknown or invalid runtime name: nvidia."),
    ("toolkit_not_configured", "Error response from daemon: failed to create task: unresolvable CDI devices nvidia.com/gpu=all"),
    ("gpu_lost", "Failed to initialize NVML: Unknown Error"),
    ("no_gpu", "RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG`"),
    ("no_gpu", "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"),
    ("memlock_small", "libibverbs: Please set max locked memory (ulimit -l) to 'unlimited' (current: 8192 kbytes)"),
    ("memlock_small", "libibverbs: Warning: RLIMIT_MEMLOCK is 65536 bytes."),
    (
        "memlock_not_permitted",
        'docker: Error response from daemon: failed to create shim: error setting rlimit type 8: operation not permitted": unknown.',
    ),
    ("socket_fallback", "spark1:1:2 [0] NCCL INFO NET/IB : No device found.\nspark1:1:2 [0] NCCL INFO Using network Socket"),
    ("nccl_no_network", "spark1:1:2 [0] NCCL WARN Failed to initialize any NET plugin"),
    (
        "device_missing",
        'docker: Error response from daemon: error gathering device information while adding custom device "/dev/infiniband": no such file',
    ),
    ("disk_full", "Error processing tar file(exit status 1): write /usr/lib/x.so: no space left on device"),
    ("disk_full", 'rsync: [receiver] write failed on "/srv/model": No space left on device (28)'),
    ("disk_full", "OSError: [Errno 28] No space left on device: '/cache/x.lock'"),
    ("disk_full", "cp: error writing 'a': Disk quota exceeded"),
    ("docker_group", "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock"),
    ("docker_group", "permission denied while trying to connect to the docker API at unix:///var/run/docker.sock"),
    ("docker_down", "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"),
    ("package_lock", "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 1234 (unattended-upgr)"),
    ("package_lock", "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 77 (apt-get)"),
    ("externally_managed", "error: externally-managed-environment"),
    ("cache_not_writable", "PermissionError: [Errno 13] Permission denied: '/.triton'"),
    ("cache_not_writable", "PermissionError: [Errno 13] Permission denied: '/root/.cache/vllm/torch_compile_cache'"),
    ("cache_not_writable", "OSError: [Errno 30] Read-only file system: '/home/x/.cache/flashinfer'"),
    ("cache_not_writable", "mkdir: cannot create directory '/.cache': Permission denied"),
    ("permission_denied", "PermissionError: [Errno 13] Permission denied: '/model/config.json'"),
    ("cache_corrupt", "triton.KeyError: Unknown key: 'cubin'"),
    ("stream_capture", "RuntimeError: CUDA error: operation not permitted when stream is capturing"),
    ("no_c_compiler", "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."),
    ("no_c_compiler", "FileNotFoundError: [Errno 2] No such file or directory: 'gcc'"),
    ("no_c_compiler", "RuntimeError: Ninja is required to load C++ extensions"),
    ("python_headers_missing", "/tmp/tmpx/main.c:5:10: fatal error: Python.h: No such file or directory"),
    (
        "no_cxx_compiler",
        E + "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx:"
        " (None, 'g++')",
    ),
    ("no_cxx_compiler", "/bin/sh: 1: g++: not found"),
    ("missing_shard", W + "FileNotFoundError: Weight files referenced in index but missing: {'/model/gone.safetensors'}"),
    (
        "broken_shard",
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",
    ),
    ("broken_shard", "SafetensorError: Error while deserializing header: header too small"),
    ("broken_shard", "Exception: Error while deserializing header: HeaderTooLarge"),
    (
        "mtp_not_loaded",
        "ValueError: Following weights were not initialized from checkpoint: {'model.norm.weight', 'model.pre_fc_norm_hidden.weight'}",
    ),
    ("weights_not_initialized", "ValueError: Following weights were not initialized from checkpoint: {'language_model.model.norm.weight'}"),
    (
        "weight_skipped",
        "(Worker pid=3) WARNING 11-29 20:31:06 [qwen.py:1] Parameter layers.0.mlp.w_scale not found in params_dict, skip loading",
    ),
    ("quantized_lm_head", "ValueError: There is no module or parameter named 'lm_head.qweight' in Qwen3_5MoeForConditionalGeneration."),
    ("quantized_lm_head", "ValueError: There is no module or parameter named 'language_model.lm_head.scales' in Qwen3."),
    (
        "unknown_tensor",
        "ValueError: There is no module or parameter named 'layers.0.nope' in Qwen3_5Model. The available parameters are: {}",
    ),
    ("tensor_shape", "AssertionError: Attempted to load weight (torch.Size([128])) into parameter (torch.Size([256]))"),
    ("tokenizer_class", "ValueError: Tokenizer class TokenizersBackend does not exist or is not currently imported."),
    (
        "architecture_unknown",
        "ValueError: The checkpoint has model type `qwen3_5_moe` but Transformers does not recognize this architecture.",
    ),
    ("gated_no_token", "OSError: You are trying to access a gated repo."),
    ("gated_no_token", "Cannot access gated repo for url https://hub.example/org/name/resolve/main/config.json. 401 Client Error."),
    ("gated_not_granted", "403 Client Error: Forbidden for url"),
    ("repository_not_found", "Repository Not Found for url. 404 Client Error."),
    ("unknown_parser", "KeyError: 'invalid tool call parser: nope_parser (chose from { hermes,qwen3_xml })'"),
    ("unknown_parser", "TypeError: reasoning_parser_name='nope_parser' has not been registered"),
    ("unknown_parser", "TypeError: Error: --enable-auto-tool-choice requires --tool-call-parser"),
    ("bad_argument", "vllm serve: error: argument --kv-cache-dtype: invalid choice: 'nope' (choose from 'auto', 'fp8')"),
    ("bad_argument", "vllm: error: unrecognized arguments: --enable-prompt-tokens-details"),
    ("bad_config", "pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\nnope\n  Unexpected keyword argument [type=x]"),
    ("bad_config", "ValueError: Unknown attention backend: 'NOPE'. Valid options are: FLASH_ATTN"),
    ("bad_config", "ValueError: Load format `nope` is not supported"),
    (
        "prefix_caching_hybrid",
        W + '  File "/v/vllm/v1/worker/mamba_utils.py", line 1226, in run_fused_precopy: precopy_mamba_align_fused_kernel[grid](',
    ),
    ("port_in_use", "OSError: [Errno 98] Address already in use"),
    ("port_in_use", "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use"),
    ("plugin_not_loaded", "(EngineCore pid=4) ERROR 11-29 20:31:06 [__init__.py:72] Failed to load plugin dgxspark_kernels"),
    ("rendezvous_timeout", "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined."),
    ("rank_timeout", "TimeoutError: RPC call to execute_model timed out."),
    ("worker_killed", "(EngineCore pid=3) ERROR 11-29 20:31:06 [x.py:7] Worker proc VllmWorker-1 died unexpectedly (exit code: -9)"),
    ("oom_killed", "dgxspark-vllm.service: A process of this unit has been killed by the OOM killer."),
    ("image_missing", "Unable to find image 'sha256:abc' locally"),
    (
        "container_name_taken",
        'docker: Error response from daemon: Conflict. The container name "/dgxspark-vllm" is already in use by container "ab".',
    ),
    ("wrong_architecture", "exec /usr/bin/vllm: exec format error"),
    ("module_missing", "ModuleNotFoundError: No module named 'fastsafetensors'"),
    ("too_many_files", "OSError: [Errno 24] Too many open files: '/x'"),
    ("docker_error", "docker: invalid reference format."),
    ("python_error", E + "somelib.WeirdError: nobody has seen this"),
    ("python_error", "ZeroDivisionError: division by zero"),
]


@pytest.mark.parametrize(("name", "text"), FAULTS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(FAULTS)])
def test_a_fault_is_classed_first_and_with_its_line(name: str, text: str) -> None:
    found = diagnose(text)
    assert [d["class"] for d in found][:1] == [name]
    assert found[0]["evidence"]
    assert found[0]["remedy"]
    assert "{" not in found[0]["remedy"].replace("{engine_args: {", "")


@pytest.mark.parametrize(("name", "text"), FAULTS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(FAULTS)])
def test_a_fault_inside_a_whole_log_is_found_too(name: str, text: str) -> None:
    log = (FIXTURES / "startup-0.32.log").read_text()
    if name == "socket_fallback":
        log = log.replace("world_size=1 rank=0", "world_size=2 rank=0")
    middle = log.index("Loading drafter model")
    start = log.rindex("\n", 0, middle) + 1
    consequences = (
        f"\n{W}WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.\n"
        f"{E}EngineCore failed to start.\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}\n"
    )
    found = diagnose(log[:start] + text + consequences)
    assert found[0]["class"] == name
    assert "engine_died" not in [d["class"] for d in found] or silent(found)


HARMLESS = [
    (FIXTURES / "startup-0.32.log").read_text(),
    (FIXTURES / "shutdown-0.32.txt").read_text(),
    "(Worker pid=3) INFO 11-29 20:31:06 [gpu_worker.py:1] Free memory on device (110.37/121.69 GiB) on startup.",
    "Free memory on device (110.37/121.69 GiB) on startup.\nDesired GPU memory utilization is (0.87, 105.87 GiB).",
    "WARNING 11-29 20:31:06 [fp8.py:1] flashinfer does not support backend 'trtllm' with capability 121, falling back to TRITON",
    "does not support backend 'trtllm' with capability 121. Falling back to TRITON.",
    "WARNING 11-29 20:30:48 [u.py:255] Found ulimit of 20000. This can cause errors like `OSError: [Errno 24] Too many open files`.",
    "INFO 11-29 20:31:06 [logger.py:1] Received request chatcmpl-1: prompt: 'Explain CUDA out of memory and ValueError: x'",
    "spark1:1:2 [0] NCCL INFO NET/IB : No device found.\nspark1:1:2 [0] NCCL INFO Using network IB",
    "(Worker pid=1) INFO 11-29 20:31:05 [p.py:1] world_size=1 rank=0 local_rank=0\nNET/IB : No device found.\nUsing network Socket",
    "spark1:1:2 [0] NCCL INFO NET/IB : Using [0]rocep1s0f1:1/RoCE [RO]; OOB enp1s0f1np1:192.0.2.1<0>",
    "set_mempolicy: Operation not permitted",
    "Traceback (most recent call last):",
    "KeyboardInterrupt",
    "asyncio.exceptions.CancelledError",
    "init engine (profile, create kv cache, warmup model) took 3.69 s",
    "Loading safetensors checkpoint shards: 100% Completed | 2/2",
    "ninja: no work to do.",
    "0 errors, 0 warnings",
    "",
]


@pytest.mark.parametrize("text", HARMLESS, ids=range(len(HARMLESS)))
def test_success_and_noise_are_no_fault(text: str) -> None:
    assert diagnose(text) == []


def test_the_root_cause_comes_before_what_follows_and_alone() -> None:
    log = "\n".join(
        [
            W + "WorkerProc hit an exception.",
            W + "Traceback (most recent call last):",
            W + '  File "/v/vllm/v1/worker/mamba_utils.py", line 1226, in run_fused_precopy',
            W + "    precopy_mamba_align_fused_kernel[grid](",
            W + "TypeError: 'function' object is not subscriptable",
            E + "EngineCore encountered a fatal error.",
            E + "RuntimeError: Worker failed with error 'x', please check the stack trace above for the root cause",
            "(APIServer pid=1) ERROR 11-29 20:50:39 [a.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        ]
    )
    assert [d["class"] for d in diagnose(log)] == ["prefix_caching_hybrid"]
    assert "enable-prefix-caching: false" in diagnose(log)[0]["remedy"]


def test_an_unknown_exception_wins_over_what_follows() -> None:
    log = f"{E}foo.BarError: first\n{E}ValueError: second\n{E}EngineCore failed to start."
    assert [(d["class"], d["evidence"]) for d in diagnose(log)] == [("python_error", "foo.BarError: first")]


def test_only_consequences_are_better_than_nothing() -> None:
    assert [d["class"] for d in diagnose("RuntimeError: Engine core initialization failed. See root cause above.")] == ["engine_died"]


def test_several_causes_are_all_told_and_silent_ones_last() -> None:
    log = "Parameter a.b not found in params_dict, skip loading\nOSError: [Errno 28] No space left on device\nCUDA out of memory"
    found = diagnose(log)
    assert [d["class"] for d in found] == ["disk_full", "gpu_oom", "weight_skipped"]
    assert [d["class"] for d in silent(found)] == ["weight_skipped"]
    assert [p["severity"] for p in as_problems(found)] == ["error"] * 3


def test_memory_arithmetic_is_in_the_remedy() -> None:
    text = "Free memory on device cuda:0 (36.75/121.63 GiB) on startup is less than desired GPU memory utilization (0.85, 103.38 GiB)."
    found = diagnose(text)[0]
    assert "36.75/121.63" in found["evidence"]
    assert "gpu-memory-utilization: 0.30" in found["remedy"]
    assert found["retryable"] is False


@pytest.mark.parametrize(
    ("free", "total", "share"), [(101.5, 121.69, 0.83), (105.88, 121.69, 0.87), (121.69, 121.69, 1.0), (0.0, 121.69, 0.0), (1.0, 0.0, 0.0)]
)
def test_util_max(free: float, total: float, share: float) -> None:
    assert util_max(free, total) == share


@pytest.mark.parametrize("name", ["package_lock", "docker_down", "container_name_taken", "rendezvous_timeout"])
def test_what_may_be_tried_again(name: str) -> None:
    assert all(rule.retryable for rule in RULES if rule.name == name)


def test_evidence_is_short_and_holds_no_token() -> None:
    found = diagnose("OSError: [Errno 28] No space left on device, token hf_s3cr3tvalue " + "x" * 5000)
    assert len(found[0]["evidence"]) <= 400
    assert "s3cr3t" not in found[0]["evidence"]


def test_a_validation_error_brings_its_field_along() -> None:
    found = diagnose("pydantic_core.ValidationError: 1 validation error for CacheConfig\ngpu_memory_utilization\n  Input should be <= 1")
    assert "gpu_memory_utilization | Input should be <= 1" in found[0]["evidence"]
