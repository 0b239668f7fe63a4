"""A unit inside somebody's graph: Inductor runs all of it before the op that ends it.

[Note: what the end waits for] The op declares the unit's outputs as mutated, so they are computed before it. What the
unit writes elsewhere is not among them: an argument (a key-value cache), a buffer, a tensor that it keeps somewhere.
Inductor sees no reason to compute that first. It puts a plain write into a graph's input off to the end of the graph,
and with it every read of a weight for it: after the slot was handed back. Were such tensors named as mutated too, each
would be copied; and some cannot be found in what a unit is given (a cache in an object).

So Inductor is told what the schemas cannot say. What was traced between the two ops stays between them in its graph. A
write into an input goes there too, where nothing behind reads what was there before. When the second op is lowered, all
that is used behind is computed, and the op waits for all operations since the first. No number changes, nothing is
copied. Nor does a pattern of Inductor's (a product and a sum, made one kernel) reach over either op: both count as ops
that mutate, also in the form in which they mutate nothing yet.
"""

from __future__ import annotations

import functools
import operator
import threading
from typing import Any

import torch

from flextensor.compile.correction import suffix_cache_keys

KEY_SUFFIX = "flextensor-order-2"
"""Change it with what the lowering does: graphs that were cached without it are not reused."""

_lock = threading.Lock()
_applied = False


def order_reads_before_the_end() -> None:
    """Tell Inductor, once for this process. See [Note: what the end waits for]."""
    global _applied
    with _lock:
        if _applied:
            return
        from torch._inductor import lowering, pattern_matcher
        from torch._inductor.fx_passes import post_grad
        from torch._inductor.virtualized import V

        reorder, mutates = post_grad.reorder_for_locality, pattern_matcher.is_mutation_op
        begin, end = torch.ops.flextensor.pre_compute.default, torch.ops.flextensor.post_compute.default
        plain_begin, plain_end = lowering.fallback_handler(begin), lowering.fallback_handler(end)

        def lower_begin(weights: list[Any], unit: Any) -> Any:
            _move_writes(V.graph.current_node.graph, V.graph.user_to_last_uses)
            return plain_begin(weights, unit)

        def lower_end(outputs: list[Any], unit: Any) -> Any:
            behind = _used_behind(V.graph.current_node.graph, V.graph.env)
            result = plain_end(outputs, unit)
            _wait_for_the_unit(V.graph, behind)
            return result

        @functools.wraps(reorder)
        def reorder_and_gather(graph: torch.fx.Graph) -> Any:
            unit = set(_split(graph)[0])
            result = reorder(graph)
            _gather(graph, unit)
            return result

        @functools.wraps(mutates)
        def mutates_or_is_ours(node: torch.fx.Node) -> bool:
            return _is_ours(node) or bool(mutates(node))

        post_grad.reorder_for_locality = reorder_and_gather
        pattern_matcher.is_mutation_op = mutates_or_is_ours
        lowering.register_lowering(begin, type_promotion_kind=None)(lower_begin)
        lowering.register_lowering(end, type_promotion_kind=None)(lower_end)
        suffix_cache_keys(KEY_SUFFIX)
        _applied = True


def _is_ours(node: torch.fx.Node) -> bool:
    """One of the two ops, functionalised."""
    ops = torch.ops.flextensor
    return bool(node.args) and node.args[0] in (ops.pre_compute.default, ops.post_compute.default)


def _split(graph: torch.fx.Graph) -> tuple[list[torch.fx.Node], torch.fx.Node | None, list[torch.fx.Node]]:
    """The nodes of the unit (all so far, where a graph break lies before), the op that ends it, what is behind."""
    begin, end = torch.ops.flextensor.pre_compute.default, torch.ops.flextensor.post_compute.default
    nodes = list(graph.nodes)
    ops = [node.args[0] if _is_ours(node) else node.target for node in nodes]
    if end not in ops:
        return [], None, []
    at = ops.index(end)
    return nodes[ops.index(begin) + 1 if begin in ops else 0 : at], nodes[at], nodes[at + 1 :]


def _gather(graph: torch.fx.Graph, unit: set[torch.fx.Node]) -> None:
    """Put the unit's nodes back before its end."""
    _, end, behind = _split(graph)
    for node in behind:
        if node in unit and end is not None:
            end.prepend(node)


def _move_writes(graph: torch.fx.Graph, last_uses: dict[torch.fx.Node, list[torch.fx.Node]]) -> None:
    """Writes into the graph's inputs of what the unit has made are lowered before its end, not at the graph's.

    last_uses: the values that the interpreter forgets after a node, in the order as it was; the unit's end may need
    what a write was the last to use.
    """
    inside, end, behind = _split(graph)
    unit, rest = set(inside), set(behind)
    for write in behind:
        given = write.all_input_nodes
        if end is None or write.target is not torch.ops.aten.copy_.default or len(given) != 2:
            continue
        into, value = given
        if value in unit and rest & (_users_of_memory(into) | set(value.users)) == {write}:
            end.prepend(write)
            last_uses.setdefault(end, []).extend(last_uses.pop(write, []))


def _users_of_memory(tensor: torch.fx.Node) -> set[torch.fx.Node]:
    """Who uses the tensor or a view of it."""
    users: set[torch.fx.Node] = set()
    left = [tensor]
    while left:
        for user in left.pop().users:
            if user in users:
                continue
            users.add(user)
            returns = user.target._schema.returns if isinstance(user.target, torch._ops.OpOverload) else ()
            views = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
            # getitem: one of several views (split, unbind), or any other op's result.
            if views or user.target is operator.getitem:
                left.append(user)
    return users


def _used_behind(graph: torch.fx.Graph, values: dict[torch.fx.Node, Any]) -> set[str]:
    """The buffers of what the unit has made and something behind its end uses; they are computed here."""
    from torch._inductor import ir

    inside, end, behind = _split(graph)
    rest = {end, *behind}
    names = set()
    for node in inside:
        value = None if rest.isdisjoint(node.users) else values[node]
        if isinstance(value, ir.TensorBox):
            value.realize()
            names.add(value.get_name())
    return names


def _wait_for_the_unit(graph: Any, behind: set[str]) -> None:
    """The op that ends the unit runs after all operations since the one that began it.

    Named are those that no other of the unit waits for, and those that something behind uses: an operation that is
    named needlessly could not write over what it reads.
    """
    ops = torch.ops.flextensor
    overloads = [getattr(operation, "op_overload", None) for operation in graph.operations]
    begin = overloads.index(ops.pre_compute.default) + 1 if ops.pre_compute.default in overloads else 0
    end = overloads.index(ops.post_compute.default)
    inside = graph.operations[begin:end]
    made = {buffer.get_name() for operation in inside for buffer in operation.get_outputs()}
    read = {dep.name for operation in inside for dep in operation.get_read_writes().reads}
    last = sorted((made & behind) | (made - read))
    graph.additional_buffer_deps[graph.operations[end].get_operation_name()].update(last)
