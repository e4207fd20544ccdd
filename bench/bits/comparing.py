"""Records beside each other: what differs first, and the table."""
import hashlib
import json

# What a case consists of, and in which order differences are looked for.
SECTIONS = {
    "data": ("data",),
    "losses": ("steps",),
    "metrics": ("evals", "test", "outputs"),
    "weights": ("weights",),
    "rng": ("rng",),
}


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def compact(record):
    """The same with a hash for each section of a case, and the first and the last loss."""
    cases = {name: compact_case(case) for name, case in record["cases"].items()}
    return {**{key: value for key, value in record.items() if key != "cases"}, "compact": True, "cases": cases}


def compact_case(case):
    kept = {key: case[key] for key in ("program", "ranks", "precision", "options", "unstable", "error", "resumed_equal") if key in case}
    if "error" in case:
        return kept
    hashes = {section: digest([case[field] for field in fields]) for section, fields in SECTIONS.items()}
    return {**kept, **hashes, "num_steps": len(case["steps"]), "first_loss": case["steps"][0]["loss"], "last_loss": case["steps"][-1]["loss"]}


def differing(one, other, is_compact=False):
    """The sections that differ, each with the first difference in words."""
    for case in (one, other):
        if "error" in case:
            return {"run": f"failed: {case['error'].splitlines()[0][:100]}"}
    found = {}
    for section, fields in SECTIONS.items():
        if is_compact:
            if one[section] != other[section]:
                losses = f", last loss {one['last_loss']} and {other['last_loss']}" if section == "losses" else ""
                found[section] = f"{section}{losses}"
            continue
        for field in fields:
            words = first_difference(field, one[field], other[field])
            if words and section not in found:
                found[section] = words
    return found


def first_difference(name, one, other):
    """None where both are equal."""
    if one == other:
        return None
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if key not in one or key not in other:
                return f"{name}: {key} is only in the {'first' if key in one else 'second'}"
            if one[key] != other[key]:
                return first_difference(f"{name}: {key}", one[key], other[key])
    if isinstance(one, list) and isinstance(other, list):
        for index, (a, b) in enumerate(zip(one, other)):
            if a != b:
                return first_difference(f"{name}[{index}]", a, b)
        return f"{name}: {len(one)} and {len(other)}"
    short = [str(value)[:24] for value in (one, other)]
    return f"{name}: {short[0]} and {short[1]}"


def verdict(one, other, is_compact):
    """The words of a row, and whether all is well."""
    unstable = sorted({*one.get("unstable", []), *other.get("unstable", [])})
    found = {section: words for section, words in differing(one, other, is_compact).items() if section not in unstable}
    if found:
        return f"**DIFFERENT**: {next(iter(found.values()))}", False
    for case in (one, other):
        if case.get("resumed_equal") is False:
            return "**DIFFERENT**: the resumed run ends otherwise than the uninterrupted one", False
    if unstable:
        return f"equal; not repeatable: {', '.join(unstable)}", True
    return "equal", True


def table(one, other):
    """Markdown, and whether all is equal."""
    is_compact = bool(one.get("compact") or other.get("compact"))
    if is_compact:
        one, other = [record if record.get("compact") else compact(record) for record in (one, other)]
    lines, equal = [], True
    for key in ("machine", "libtorch"):
        if one.get(key) != other.get(key):
            lines.append(f"note: recorded with another {key}, which may change bits: {one.get(key)}; {other.get(key)}")
    lines += [""] if lines else []
    lines += ["| program | ranks | precision | options | steps | last loss | bits |", "|---|---|---|---|---|---|---|"]
    sides = [one["cases"], other["cases"]]
    for name in [*sides[0], *(name for name in sides[1] if name not in sides[0])]:
        has = [name in side for side in sides]
        case = next(side[name] for side in sides if name in side)
        words, is_good = ("**MISSING** in the " + ("second" if has[0] else "first"), False)
        if all(has):
            words, is_good = verdict(sides[0][name], sides[1][name], is_compact)
        equal &= is_good
        steps, loss = steps_and_loss(case)
        lines.append(f"| {case['program']} | {case['ranks']} | {case['precision']} | {case['options'] or '-'} | {steps} | {loss} | {words} |")
    return "\n".join(lines), equal


def steps_and_loss(case):
    if "error" in case:
        return "-", "-"
    if "num_steps" in case:
        return case["num_steps"], case["last_loss"]
    return len(case["steps"]), case["steps"][-1]["loss"]
