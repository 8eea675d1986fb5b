"""What a device of a stage holds, layer by layer and in plain words: what the planner's tables are compared with."""

from __future__ import annotations

from resilient.templates.inputs.profile import LayerProfile, ModelProfile


def used(profile: ModelProfile, layer: LayerProfile) -> list[LayerProfile]:
    """A layer, and those whose states it uses."""
    return [layer, *(profile.layers[profile.index(owner)] for owner in layer.shares)]


class StageBytes:
    """Layers ``first .. end - 1`` on some groups of devices, each of a tensor-parallel degree.

    Attributes:
        held: What is there once, whatever runs.
        arriving: Part of it: what comes in, and what goes back.
        each: Kept of each microbatch.
        handed_on: Part of it: what goes out, and room for what comes back.
        each_again: Kept of each where layers run again.
        workspace: Used beside what is kept.
        split_workspace: The same while the first part of a backward runs, with what it leaves at parameters.
        largest: Used beside that where layers run again.
        waiting: Kept of each microbatch between the parts of its backward: of one part that of sharded stages is, and
            that of frozen ones.
        waiting_again: The same where layers run again: they do so in the first part.
    """

    def __init__(
        self, profile: ModelProfile, first: int, end: int, groups: int = 1, degree: int = 1, *, rising: bool = True
    ) -> None:
        self._profile, self._first, self._groups = profile, first, groups
        self._layers = profile.layers[first:end]
        self._degree = degree
        q = profile.tp_degrees.index(degree)
        self.arriving = self._arriving(first)
        self.held = self._held(first, end) + self.arriving + max(layer.read_bytes for layer in self._layers)
        self._costs = [layer.costs[q] for layer in self._layers]
        self._kept = [self._of_layer(k, q, is_first=k == first or groups > 1) for k in range(first, end)]
        # for the search no stage holds less than one that ends before it
        ends = range(1 if rising else len(self._layers), len(self._layers) + 1)
        self.handed_on = self._handed_on(ends[-1])
        self.each = max(sum(self._kept[:e]) + self._handed_on(e) for e in ends)
        self.each_again = max(self._inputs(e) + self._loaded(e) + self._handed_on(e) for e in ends)
        self.workspace = max(0, max(self._newest(k, e) for e in ends for k in range(e)) - self.each)
        splits = groups == 1 and self._layers[0].input_gradient
        self._deferred = [layer.costs[q].deferred_bytes if splits else 0 for layer in self._layers]
        differentiated = max(self._in_parts(k, e) for e in ends for k in range(e)) if splits else 0
        self.split_workspace = max(0, differentiated - self.each) if splits else self.workspace
        self.waiting = max(self._waiting(e) for e in ends)
        trains = groups == 1 and any(layer.trainable for layer in self._layers)
        self.waiting_again = self.each_again if trains and not splits else 0
        self.largest = max(0, max(self._newest_again(k, e) for e in ends for k in range(e)) - self.each_again)

    def plain(self, before: int, waiting: int, *, splits: bool) -> int:
        """With activations kept."""
        return (
            self.held
            + before * self.each
            + waiting * self.waiting
            + (self.split_workspace if splits else self.workspace)
        )

    def again(self, before: int, waiting: int) -> int:
        """With layers that run again."""
        return self.held + before * self.each_again + waiting * self.waiting_again + self.largest

    def _newest(self, number: int, end: int) -> int:
        """Of the microbatch whose layer runs, in a stage of so many: what later ones kept is gone by then."""
        cost, there = self._costs[number], sum(self._kept[: number + 1]) + self._once(number, end)
        there += self._sums(number, end)
        if number == end - 1:
            return there + (cost.ending_workspace_bytes or cost.workspace_bytes) + self._handed_on(end)
        return there + cost.workspace_bytes + self._returned(end)

    def _differentiated(self, number: int, end: int) -> int:
        """The same in the first part of a backward: nothing is gone, and gradients wait at later layers."""
        cost, there = self._costs[number], sum(self._kept[:end]) + sum(self._deferred[number + 1 : end])
        there += self._once(number, end)
        more = cost.split_workspace_bytes - cost.workspace_bytes if cost.split_workspace_bytes else cost.deferred_bytes
        if number == end - 1:
            there += (cost.ending_workspace_bytes or cost.workspace_bytes) + self._handed_on(end)
        else:
            there += cost.workspace_bytes - cost.given_bytes + self._returned(end)  # the next layer keeps what it gave
        return there + max(more, 0)

    def _in_parts(self, number: int, end: int) -> int:
        """The same of any stage, and of the second part, where what all users of a tied state find is there at once.

        Where nothing is trained a backward has one part.
        """
        trains = any(layer.trainable for layer in self._layers[:end])
        if not trains:
            return self._newest(number, end)
        found = (num_bytes * (len(users) + 1) for num_bytes, users in self._tied(end) if len(users) > 1)
        second_part = sum(self._kept[:end]) + self._handed_on(end) + max(found, default=0)
        return max(self._differentiated(number, end), second_part)

    def _newest_again(self, number: int, end: int) -> int:
        """As the first, where layers run again."""
        cost, there = self._costs[number], self._inputs(number + 1) + self._loaded(end) + self._once(number, end)
        there += self._unkept(number) + self._sums(number, end)
        ending = cost.ending_workspace_bytes or cost.workspace_bytes
        if number == end - 1:
            return there + (cost.ending_again_bytes or cost.activation_bytes + ending) + self._handed_on(end)
        return there + (cost.again_bytes or cost.activation_bytes + cost.workspace_bytes) + self._returned(end)

    def _tied(self, end: int) -> list[tuple[int, list[int]]]:
        """Of tied states: bytes of the gradients, and which of so many layers use it."""
        owners = {owner for layer in self._profile.layers for owner in layer.shares} if self._groups == 1 else set()
        found: list[tuple[int, list[int]]] = []
        for owner in owners:
            num_bytes = -(-self._profile.layers[self._profile.index(owner)].gradient_bytes // self._degree)
            layers = enumerate(self._layers[:end])
            found.append((num_bytes, [number for number, layer in layers if owner in (layer.name, *layer.shares)]))
        return found

    def _sums(self, number: int, end: int) -> int:
        """What later users of tied states have found; with the sum, if a new tensor, where the next one adds to it."""
        there = 0
        for num_bytes, users in self._tied(end):
            if any(user <= number for user in users) and any(user > number for user in users):
                there += num_bytes
                behind = next(user for user in users if user > number)
                there += min(num_bytes, self._costs[behind].viewed_bytes) * (number in users)
        return there

    def _inputs(self, end: int) -> int:
        """What layers keep that run again, as those do which have a backward and need something for it."""
        return sum(
            self._entering(self._first + number)
            for number, layer in enumerate(self._layers[:end])
            if (layer.trainable or layer.input_gradient) and (number == 0 or not layer.keeps_nothing)
        )

    def _unkept(self, number: int) -> int:
        """What enters one that needs nothing while it runs."""
        layer = self._layers[number]
        runs = layer.trainable or layer.input_gradient
        return self._entering(self._first + number) * (runs and layer.keeps_nothing)

    def _loaded(self, end: int) -> int:
        runs = (layer.loaded_bytes for layer in self._layers[:end] if layer.trainable or layer.input_gradient)
        return max(runs, default=0)

    def _waiting(self, end: int) -> int:
        """Between the parts, where so many layers are the stage."""
        if self._groups > 1 or not any(layer.trainable for layer in self._layers[:end]):
            return 0
        if not self._layers[0].input_gradient:
            return sum(self._kept[:end]) + self._handed_on(end)
        return sum(self._kept[:end]) + sum(self._deferred[:end]) + self._handed_on(end) - self._returned(end) // 2

    def _held(self, first: int, end: int) -> int:
        """States and gradients."""
        profile, degree = self._profile, self._degree
        names = {each.name for layer in profile.layers[first:end] for each in used(profile, layer)}
        states = [layer.device_bytes(degree) * degree for layer in profile.layers if layer.name in names]
        return -(-sum(states) // (self._groups * degree))

    def _arriving(self, first: int) -> int:
        """Of a stage behind others: what comes in, and the gradient that goes back.

        Where nothing is differentiated: what its first layer is computed from.
        """
        return (self._entering(first) + (self._gradient(first) or self._passing(first))) * (first > 0)

    def _of_layer(self, index: int, q: int, *, is_first: bool) -> int:
        """What a layer keeps: with what enters if it is held for its gradient, else if one of two layers keeps it."""
        own = self._profile.layers[index].costs[q]
        entered = own.entered_bytes * self._profile.layers[index].input_gradient
        if is_first:
            return max(own.activation_bytes + entered, self._gradient(index))
        before = self._profile.layers[index - 1].costs[q].given_bytes if index > 0 else 0
        return own.activation_bytes + min(entered, before)

    def _entering(self, index: int) -> int:
        return -(-self._profile.layers[index].input_bytes // self._degree)

    def _gradient(self, index: int) -> int:
        return self._entering(index) * self._profile.layers[index].input_gradient

    def _passing(self, index: int) -> int:
        """What a layer without a backward is computed from, which nobody keeps."""
        layer = self._profile.layers[index]
        return 0 if layer.trainable or layer.input_gradient else self._entering(index)

    def _handed_on(self, end: int) -> int:
        """Sent, and room for its gradient."""
        index = self._first + end
        return self._entering(index) + self._gradient(index) if index < len(self._profile.layers) else 0

    def _returned(self, end: int) -> int:
        """The same, where a gradient returns: else it is part of what is used while the last layer runs."""
        index = self._first + end
        return 2 * self._gradient(index) if index < len(self._profile.layers) else 0

    def _once(self, number: int, end: int) -> int:
        """While a layer runs: what enters and is kept by none, and what is gathered for it in a stage of so many."""
        passing = self._passing(self._first + number) if number > 0 else 0
        if self._groups == 1:
            return passing
        parameters, gradients = (
            [-(-sum(of(x) for x in used(self._profile, layer)) // self._degree) for layer in self._layers[:end]]
            for of in (lambda x: x.parameter_bytes, lambda x: x.gradient_bytes)
        )
        before = parameters[number - 1] if number > 0 else 0
        behind = gradients[number + 1] if number + 1 < end else 0
        addends = self._groups - 1 + min(self._groups, 3) - 1
        whole = before + parameters[number] + gradients[number] + behind + -(-behind * addends // self._groups)
        return passing + whole
