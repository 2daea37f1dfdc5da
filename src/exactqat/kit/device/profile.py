# SPDX-License-Identifier: Apache-2.0
"""The devices, one declaration each: what rounds differently on them, what runs them, and what people call them.

An operator never asks for the name of a device. It asks for the property that makes the difference, so a new device is
one more `declare(Profile(...))` here, and its counts in measured.json once the sweep has compared it with its runtime.
A user's own device is a file of data, `read_profile`, which names the declared device that it is like and says what
differs, operator by operator.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from .refusals import need
from .stated_arithmetic import Arithmetic


@dataclass(frozen=True)
class Profile:
    """A device: one way of rounding, and what is known of the hardware and programs that round so.

    Attributes:
        name: in every public function, in settings, and in the files of jobs.
        title: what runs a network, in reports and messages.
        description: of the kernels, for the page of devices.
        aliases: short names that are accepted too; on a machine that runs several devices of one alias, it is the first
            of them that needs no emulation.
        former_names: what earlier versions called it; refused, with the name that it has now.
        delegates: XNNPACK computes what it can of the int8 operators: sums times a float32 scale, rounded to even.
            Otherwise, and in int16, the runtime's own kernels compute them by fixed-point multipliers.
        optimized: the runtime's own kernels are LiteRT's optimized ones, not the reference kernels.
        fuses_multiply_add: the compiler makes one rounding of a float32 product and the sum it enters.
        rounds_products_half_up: XNNPACK multiplies two activations exactly and rounds half up; otherwise in float32,
            half to even.
        vectors_of_eight: HARD_SWISH is computed eight int16 values at a time, ties rounded up, and the rest one by one.
        fully_connected_in_float64: the runtime's own FULLY_CONNECTED multiplies in float64 and rounds once; otherwise
            in fixed point, as the convolutions do.
        fixed_point_functions: LOGISTIC and TANH of int8, and RSQRT of int16, are computed in fixed point; otherwise in
            floating point.
        scale_root_in_float64: RSQRT takes the root of its operand's scale in float64; otherwise in float32.
        sums_as_unsigned: SUM takes int8 codes for uint8 ones.
        blocks_filled_with_code_zero: SPACE_TO_BATCH_ND pads with what lies in memory that its kernel never sets, most
            often code 0; otherwise with real 0.
        relu6_keeps_codes: RELU6 clips the operand's codes and does not bring them onto the grid of the result.
        lstm_of_operators: UNIDIRECTIONAL_SEQUENCE_LSTM is computed by the kernels of the operators that it is made of;
            otherwise by one of its own.
        four_bits_per_channel: FULLY_CONNECTED takes filters of four bits with a scale for each channel; otherwise with
            one for the whole filter only.
        reads_long_biases: some kernels take int32 biases beside int16 activations for int64.
        unsigned: of single operators, never of a device: a file holds their codes in uint8, 128 above a graph's. What
            rounds codes, instead of steps from real 0, rounds otherwise then.
        sums_in_float32: never of a device: of networks in place of the float one, whose int16 results may be a step
            off.
        most_joined: how many tensors CONCATENATION takes; None: any number.
        rounds_as_onnx: ONNX's operators between DequantizeLinear and QuantizeLinear, as onnxruntime's kernels compute
            them: integers where it has such kernels, else float32; scales in float32, ties to the even code.
        multiplier_dtype: what quotients and products of scales are formed in, where the kernels differ.
        table_dtype: what the tables for SOFTMAX of int16 are made in.
        file: what it runs, by the end of the file's name.
        runtime: the distribution that proves it, a key of `deploy.runtimes.RUNTIMES`; "": none that runs on a computer,
            so that it can be trained for and simulated only.
        machines: the processors it runs on without emulation, as `platform.machine` calls them; empty: on all.
        emulated: `deploy.runtimes.emulation` runs it on other machines.
        arithmetic: how operators compute that have a `stated` form, instead of as the properties above say; None: all
            compute as these say.
        operators: the device as single operators see it, by the name they are measured as ("ADD", "ADD:int16").
        absent: names of operators that it does not run.
        compared: names of operators -> how many codes of the device were compared, and none of them differed.
        data: what its file says, as JSON on one line; "": it is declared here.
    """

    name: str
    title: str
    description: str = ""
    aliases: tuple[str, ...] = ()
    former_names: tuple[str, ...] = ()
    delegates: bool = False
    optimized: bool = False
    fuses_multiply_add: bool = False
    rounds_products_half_up: bool = False
    vectors_of_eight: bool = False
    fully_connected_in_float64: bool = True
    fixed_point_functions: bool = False
    scale_root_in_float64: bool = False
    sums_as_unsigned: bool = False
    blocks_filled_with_code_zero: bool = False
    relu6_keeps_codes: bool = False
    lstm_of_operators: bool = False
    four_bits_per_channel: bool = True
    reads_long_biases: bool = False
    unsigned: bool = False
    sums_in_float32: bool = False
    most_joined: int | None = None
    rounds_as_onnx: bool = False
    multiplier_dtype: type[np.floating] = np.float32
    table_dtype: type[np.floating] = np.float64
    file: str = ".tflite"
    runtime: str = ""
    machines: tuple[str, ...] = ()
    emulated: bool = False
    arithmetic: Arithmetic | None = None
    operators: tuple[tuple[str, Profile], ...] = ()
    absent: tuple[str, ...] = ()
    compared: tuple[tuple[str, int], ...] = ()
    data: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def stored(self) -> str:
        """What a checkpoint keeps, and `profile_named` takes: its name, or the data of a device that only a file
        declares."""
        return self.data or self.name

    def for_unsigned(self) -> Profile:
        """The same device, for an operator whose codes a file holds in uint8: nothing takes them for others then."""
        return replace(self, unsigned=True, sums_as_unsigned=False)

    def of(self, kind: str, wide: bool = False) -> Profile:
        """The device as operators of that kind see it; wide: whether a tensor of theirs is stored in int16."""
        name = f"{kind}:int16" if wide else kind
        return next((profile for known, profile in self.operators if known == name), self)

    @property
    def scales_sums_in_float32(self) -> bool:
        """Whether sums of products are multiplied by a float32 number, and ties go to the even code."""
        return self.delegates or self.rounds_as_onnx

    def runs_on(self, machine: str) -> bool:
        """Whether a processor, as `platform.machine` calls it, runs it without emulation."""
        return bool(self.runtime) and (not self.machines or machine.lower() in self.machines)


# The properties by which devices part, and what each does to results, where the operator has no words of its own.
MECHANISMS: Mapping[str, str] = MappingProxyType(
    {
        "fuses_multiply_add": "fused multiply-add: product and sum are rounded once on ARM, each of them on x86",
        "rounds_products_half_up": "half up or to even: XNNPACK multiplies by an integer and rounds halves up on ARM; "
        "on x86 it multiplies in float32 and rounds halves to even",
        "vectors_of_eight": "vectors: eight values at a time round halves up, those that fill no vector away from zero",
        "fully_connected_in_float64": "two roundings: TFLite-Micro multiplies by a 31-bit integer and shifts, and "
        "rounds each time; LiteRT's own kernel multiplies in float64 and rounds once",
        "scale_root_in_float64": "another multiplier: TFLite-Micro takes the root of the scale in float64, LiteRT in "
        "float32",
        "fixed_point_functions": "a function in fixed point: TFLite-Micro computes it by integers, LiteRT with real "
        "numbers",
        "sums_as_unsigned": "a defect: LiteRT's reference kernel takes the int8 codes for uint8 ones",
        "blocks_filled_with_code_zero": "a defect: TFLite-Micro pads with a number that it never sets, most often code "
        "0, and not with real 0 (so nothing is claimed)",
        "relu6_keeps_codes": "a defect: TFLite-Micro clips the operand's codes and takes them for the result's",
        "lstm_of_operators": "other functions: TFLite-Micro looks up an LSTM's sigmoid and tanh, and saturates each of "
        "its sums; LiteRT computes them in fixed point of 16 bits",
        "reads_long_biases": "a defect: TFLite-Micro reads int32 biases as int64, two at once (so nothing is claimed)",
        "multiplier_dtype": "another multiplier: TFLite-Micro divides scales in float64, LiteRT in float32",
        "table_dtype": "another table: TFLite-Micro makes it in float32, LiteRT in float64",
        "rounds_as_onnx": "another file and runtime: onnxruntime multiplies by float32 scales and takes the even code "
        "at ties; it has float32 where LiteRT has fixed point",
        "optimized": "another built-in kernel: LiteRT's optimized one and its reference compute it differently",
        "delegates": "a delegate's own kernel: XNNPACK computes it by other arithmetic than the built-in kernels",
    }
)

# Names of operators, which their declarations add.
KINDS: set[str] = set()
# Devices that files beside this one declare, when they are first named.
PACKAGED = ("tosa",)
# What type checkers and editors offer where a device is asked for; `PROFILES` may hold more of a user's own.
DeviceName = Literal["xnnpack-x86", "xnnpack-arm64", "reference", "micro", "onnxruntime-x86", "tosa"]
_PROFILES: dict[str, Profile] = {}
# By name, in order of declaration.
PROFILES: Mapping[str, Profile] = MappingProxyType(_PROFILES)


def declare(profile: Profile) -> Profile:
    """Adds a device to `PROFILES`.

    Raises:
        ValueError: another device has this name, or has it as an alias.
    """
    if profile.name in known_names():
        raise ValueError(f"profile {profile.name!r} is declared already")
    _PROFILES[profile.name] = profile
    return profile


def known_names() -> tuple[str, ...]:
    """All that `profile_named` accepts: names, then aliases."""
    aliases = dict.fromkeys(alias for profile in PROFILES.values() for alias in profile.aliases)
    return (*PROFILES, *aliases)


def with_alias(alias: str) -> tuple[Profile, ...]:
    """The devices that share an alias."""
    return tuple(profile for profile in PROFILES.values() if alias in profile.aliases)


def that_run(file: str) -> tuple[str, ...]:
    """Names of the devices that run files of that kind, such as ".tflite"."""
    return tuple(profile.name for profile in PROFILES.values() if profile.file == file)


def with_runtimes() -> tuple[Profile, ...]:
    """The devices that a runtime proves: those of files are like one of them."""
    return tuple(profile for profile in PROFILES.values() if profile.runtime)


def formerly(name: object) -> str:
    """The name of the device that an earlier version called so; "": none was."""
    return next((profile.name for profile in PROFILES.values() if name in profile.former_names), "")


def profile_named(profile: str | Profile | os.PathLike[str], argument: str = "device") -> Profile:
    """The device by its name or an alias, the first one that has it; a `Profile` is returned as it is. Of a path, or a
    name that ends with ".json", the device that this file declares (`read_profile`); of a text that begins with "{",
    the one that it declares itself (`Profile.stored`). From then on its name is known.

    Args:
        argument: what messages call it.

    Raises:
        OSError: the file cannot be read.
        ValueError: there is none of that name, or the file is none of a device.
    """
    if isinstance(profile, Profile):
        return profile
    if isinstance(profile, os.PathLike) or (isinstance(profile, str) and profile.endswith(".json")):
        return read_profile(profile)
    if isinstance(profile, str) and profile.startswith("{"):
        return _declared(profile, argument)
    if profile in PACKAGED and profile not in PROFILES:
        content = json.loads(Path(__file__).with_name(f"{profile}.json").read_bytes())
        return declare(replace(profile_of_data(content), data=""))
    if isinstance(profile, str):
        match = PROFILES.get(profile) or next(iter(with_alias(profile)), None)
        if match is not None:
            return match
    now = f"; it is called {formerly(profile)!r} now" if formerly(profile) else ""
    known = dict.fromkeys((*known_names(), *PACKAGED))
    raise ValueError(f"{argument} must be one of {', '.join(known)}, got {profile!r}{now}")


# --- devices as data -------------------------------------------------------------------------------------------------

# The version of the files, and the names that they may have.
FILE_VERSION = 1
_NAMES = ("exactqat_device", "name", "title", "description", "file", "like", "properties", "arithmetic", "operators",
          "absent", "compared", "unexplained", "identified")  # fmt: skip
_FOR_PEOPLE = ("unexplained", "identified")
_DTYPES = {"float32": np.float32, "float64": np.float64}


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """The device that a JSON file declares, such as `exactqat identify` writes; it is added to `PROFILES`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is none of a device, or another device has its name.
    """
    return _declared(Path(path).read_bytes(), str(path))


def _declared(content: str | bytes, where: str) -> Profile:
    try:
        profile = profile_of_data(json.loads(content))
        need(profile.name not in PACKAGED, f"name must not be that of a declared device, got {profile.name!r}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} does not declare a device: {error}") from None
    if PROFILES.get(profile.name) != profile:
        declare(profile)
    return PROFILES[profile.name]


def profile_of_data(data: Any) -> Profile:
    """A device from what its file says: ``exactqat_device`` (1), ``name`` and, by choice, ``title``, ``description``,
    ``file``; ``like`` (a declared device), ``properties`` (see `MECHANISMS`) and ``arithmetic`` (the fields of
    `Arithmetic`) of all operators and, under their names in ``operators``, of single ones; ``absent``, ``compared``.
    What else `identify` writes is for people.

    Raises:
        ValueError: naming what is wrong and what is allowed.
    """
    _need_object(data, "the file", _NAMES)
    version, name = data.get("exactqat_device"), data.get("name")
    need(version == FILE_VERSION, f"exactqat_device must be {FILE_VERSION}, the version that is read, got {version!r}")
    fits = isinstance(name, str) and name == name.strip() != "" and name.isprintable() and len(name) <= 100
    need(fits and not name.endswith(".json"), f"name must be a word that does not end with .json, got {name!r:.120}")
    words = {word: data[word] for word in ("title", "description", "file") if word in data}
    fits = all(isinstance(text, str) and text.isprintable() for text in words.values())
    fits = fits and words.get("file", ".onnx") in (".tflite", ".onnx")
    need(fits, f"title and description must be text, and file .tflite or .onnx, got {words}")
    own: dict[str, Any] = {"name": name, "title": name, "description": "", "file": ".tflite", **words}
    own |= {"aliases": (), "former_names": (), "runtime": "", "machines": (), "emulated": False}
    operators, compared, absent = data.get("operators", {}), data.get("compared", {}), data.get("absent", [])
    for what, names, kind in (("operators", operators, dict), ("compared", compared, dict), ("absent", absent, list)):
        fits = isinstance(names, kind) and all(isinstance(entry, str) for entry in names)
        need(fits, f"{what} must hold names of operators, got {names!r}")
    unknown = sorted(entry for entry in {*operators, *compared, *absent} if entry.partition(":")[0] not in KINDS)
    need(not unknown, f"there is no operator {', '.join(unknown)}; names are such as CONV_2D and CONV_2D:int16")
    fits = all(isinstance(count, int) and count > 0 for count in compared.values())
    need(fits, f"compared must hold numbers of codes, got {compared}")
    whole = {word: data[word] for word in ("like", "properties", "arithmetic") if word in data}
    rows = tuple((kind, replace(_like(data, entry, f"operators: {kind}"), **own)) for kind, entry in operators.items())
    held: dict[str, Any] = {"operators": rows, "absent": tuple(absent), "compared": tuple(compared.items())}
    held["data"] = json.dumps({word: value for word, value in data.items() if word not in _FOR_PEOPLE})
    return replace(_like(data, whole, "the file"), **own, **held)


def _like(data: Mapping[str, Any], entry: Any, where: str) -> Profile:
    """A declared device with other properties; what an entry does not say of the device, the whole file does."""
    _need_object(entry, where, ("like", "properties", "arithmetic"))
    known, like = [profile.name for profile in with_runtimes()], entry.get("like", data.get("like", REFERENCE.name))
    need(like in known, f"{where}: like must be one of {', '.join(known)}, got {like!r}")
    properties, arithmetic = entry.get("properties", {}), entry.get("arithmetic")
    _need_object(properties, f"{where}: properties", tuple(MECHANISMS))
    values: dict[str, Any] = {}
    for name, value in properties.items():
        is_dtype = name.endswith("_dtype")
        fits = isinstance(value, str) and value in _DTYPES if is_dtype else isinstance(value, bool)
        need(fits, f"{where}: {name} must be {' or '.join(_DTYPES) if is_dtype else 'true or false'}, got {value!r}")
        values[name] = _DTYPES[value] if is_dtype else value
    if arithmetic is not None:
        _need_object(arithmetic, f"{where}: arithmetic", None)
        try:
            arithmetic = Arithmetic.from_data(arithmetic)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return replace(PROFILES[like], arithmetic=arithmetic, **values)


def _need_object(value: Any, where: str, names: tuple[str, ...] | None) -> None:
    need(isinstance(value, dict), f"{where} must be a JSON object, got {type(value).__name__}")
    unknown = [] if names is None else sorted(set(value) - set(names))
    need(not unknown, f"{where} has {', '.join(unknown)}; known are {', '.join(names or ())}")


X86 = declare(
    Profile(
        "xnnpack-x86",
        title="LiteRT with XNNPACK on x86",
        description="LiteRT's default kernels on x86-64 processors",
        aliases=("xnnpack",),
        former_names=("x86",),
        delegates=True,
        optimized=True,
        runtime="ai-edge-litert",
        machines=("x86_64", "amd64"),
    )
)
ARM64 = declare(
    Profile(
        "xnnpack-arm64",
        title="LiteRT with XNNPACK on 64-bit ARM",
        description="LiteRT's default kernels on 64-bit ARM",
        aliases=("xnnpack",),
        former_names=("arm64",),
        delegates=True,
        optimized=True,
        fuses_multiply_add=True,
        rounds_products_half_up=True,
        vectors_of_eight=True,
        runtime="ai-edge-litert",
        machines=("aarch64", "arm64"),
        emulated=True,
    )
)
REFERENCE = declare(
    Profile(
        "reference",
        title="LiteRT with its reference kernels",
        description="LiteRT's reference kernels (`OpResolverType.BUILTIN_REF`)",
        sums_as_unsigned=True,
        runtime="ai-edge-litert",
    )
)
MICRO = declare(
    Profile(
        "micro",
        title="TFLite-Micro",
        description="TFLite-Micro's reference kernels, and CMSIS-NN",
        fully_connected_in_float64=False,
        fixed_point_functions=True,
        scale_root_in_float64=True,
        blocks_filled_with_code_zero=True,
        relu6_keeps_codes=True,
        lstm_of_operators=True,
        four_bits_per_channel=False,
        most_joined=10,
        reads_long_biases=True,
        multiplier_dtype=np.float64,
        table_dtype=np.float32,
        runtime="tflite-micro",
    )
)
ONNXRUNTIME_X86 = declare(
    Profile(
        "onnxruntime-x86",
        title="onnxruntime on x86",
        description="onnxruntime's CPU kernels on x86-64 processors with VNNI instructions, for the .onnx file",
        rounds_as_onnx=True,
        file=".onnx",
        runtime="onnxruntime",
        machines=("x86_64", "amd64"),
    )
)
# What a network is trained for where nobody names a device.
DEFAULT_PROFILE = X86.name
# The alias of LiteRT's default kernels, on whatever processor.
DEFAULT_KERNELS = "xnnpack"
