"""Slips of one line, planted by someone who had read the package and none of its tests.

    python tests/mutations.py --slips            writes benchmarks/results/slips.{json,md}
    python tests/mutations.py --slips PATTERN    those whose name contains PATTERN

`FIRST` were chosen before any test was read; the tests that were written for those that got away came afterwards.
"""

# ruff: noqa: E501 (the lines to change are quoted whole)

from __future__ import annotations

from tests.mutations import Bug

FIRST = (
    # --- likelihoods and objectives
    Bug(
        "the least scale of a heteroscedastic likelihood is not the one asked for",
        "likelihoods.py",
        ".exp().clamp_min(self.min_scale)",
        ".exp().clamp_min(1e-3)",
        "test_likelihoods",
    ),
    Bug(
        "a mixture's entropy is averaged over outputs, not summed",
        "likelihoods.py",
        "return per_output if self.means.ndim == 2 else per_output.sum(-1)",
        "return per_output if self.means.ndim == 2 else per_output.mean(-1)",
        "test_likelihoods",
    ),
    Bug(
        "far quantiles of a mixture end at three standard deviations",
        "likelihoods.py",
        "reach = 40.0 * self.scales.amax(0)",
        "reach = 3.0 * self.scales.amax(0)",
        "test_likelihoods",
    ),
    Bug(
        "learned scales of several outputs all start at the first one's",
        "likelihoods.py",
        "return [math.log(scale) for scale in scales]",
        "return [math.log(scales[0]) for _ in scales]",
        "test_likelihoods test_model",
    ),
    Bug(
        "a penalty is summed, not averaged, over the channel's draws",
        "objectives.py",
        "penalty = scale / (omega.shape[0] * omega.shape[1]) * omega.sum()",
        "penalty = scale / omega.shape[0] * omega.sum()",
        "test_identities_limits test_identities_proactive",
    ),
    # --- channels
    Bug(
        "an unlabelled regression is mostly attacked upwards",
        "channels/attack.py",
        "device=x.device) < 0.5",
        "device=x.device) < 0.8",
        "test_channels test_contracts",
    ),
    Bug(
        "a prior over eps takes other quantiles",
        "channels/prior.py",
        "levels = (torch.arange(num, dtype=torch.float64) + 0.5) / num",
        "levels = (torch.arange(num, dtype=torch.float64) + 1.0) / (num + 1)",
        "test_eps_prior",
    ),
    Bug(
        "a prior over eps is always stratified",
        "channels/prior.py",
        "for value in values], stratified",
        "for value in values], True",
        "test_eps_prior",
    ),
    Bug(
        "components drawn iid have the weights of another order",
        "channels/mixture.py",
        "            [self.weights[k] for members in self._groups for k in members],\n            dtype=torch.float64,",
        "            list(self.weights),\n            dtype=torch.float64,",
        "test_channels test_identities_attacks",
    ),
    Bug(
        "the adversary is punished for its entropy",
        "training/loop.py",
        "gain = gain + self.channel.entropy_bonus * std.log().mean()",
        "gain = gain - self.channel.entropy_bonus * std.log().mean()",
        "test_training test_channels test_training_parts",
    ),
    # --- attacks and balls
    Bug(
        "PGD throws its last restart away",
        "attacks/ascent.py",
        "for k in range(1, num):",
        "for k in range(1, num - 1):",
        "test_attacks test_attack_parts test_attack_strength",
    ),
    Bug(
        "PGD's step size is in units of eps",
        "attacks/ascent.py",
        "                    else self.step_size\n",
        "                    else self.step_size * self.ball.eps\n",
        "test_attacks test_attack_parts",
    ),
    Bug(
        "APGD ignores how much progress is asked for",
        "attacks/apgd.py",
        "stuck = (rises <= self.progress * since) | (",
        "stuck = (rises <= 0.75 * since) | (",
        "test_attacks test_minimum_norm_and_suites test_attack_parts",
    ),
    Bug(
        "Square's windows have the share as their side",
        "attacks/black_box.py",
        "round(math.sqrt(share * height * width))",
        "round(share * math.sqrt(height * width))",
        "test_attack_strength test_attacks",
    ),
    Bug(
        "a transfer attack uses one of its sources",
        "attacks/suite.py",
        "for source in self.sources:\n            x_adv",
        "for source in self.sources[:1]:\n            x_adv",
        "test_minimum_norm_and_suites test_attacks",
    ),
    Bug(
        "a threshold is lost when examples leave the batch",
        "attacks/losses.py",
        "return Exceeding(for_rows(self.loss, index), self.threshold)",
        "return Exceeding(for_rows(self.loss, index), 0.0)",
        "test_attack_parts test_minimum_norm_and_suites test_attacks",
    ),
    Bug(
        "the wanted scale of a targeted regression is taken for its variance",
        "attacks/losses.py",
        "ratio = scale.square() / variance",
        "ratio = scale / variance",
        "test_identities_attacks test_attacks",
    ),
    Bug(
        "the minimum-norm attack ignores how fast its radius shall follow",
        "attacks/minimum_norm.py",
        "rate = self.shrink * (0.02 + 0.98 * fading)",
        "rate = 0.05 * (0.02 + 0.98 * fading)",
        "test_minimum_norm_and_suites",
    ),
    Bug(
        "random points of a masked ball count the masked features",
        "balls.py",
        "free = x[0].numel() if self.mask is None else int(self.mask.expand(x.shape[1:]).sum())",
        "free = x[0].numel()",
        "test_balls",
    ),
    # --- purification
    Bug(
        "support is judged by the distance, not by the noise",
        "purification/diagnosis.py",
        "far[rows] = in_noise.squeeze(1) > limit",
        "far[rows] = square.squeeze(1) > limit",
        "test_purifier test_identities_reactive",
    ),
    Bug(
        "the evidence is not divided by the number of thetas",
        "purification/diagnosis.py",
        "- math.log(store.num_thetas * num)",
        "- math.log(num)",
        "test_purifier test_identities_reactive",
    ),
    Bug(
        "draws of a purified regression have the variance for a scale",
        "purification/regression.py",
        "variance.sqrt() * noise).to(self._x.dtype)",
        "variance * noise).to(self._x.dtype)",
        "test_purifier test_identities_reactive",
    ),
    Bug(
        "the bandwidth is chosen for one simulation, however many there are",
        "purification/simulation.py",
        "torch.cat([simulate(others) for _ in range(num)])",
        "torch.cat([simulate(others) for _ in range(1)])",
        "test_purifier_simulated",
    ),
    # --- metrics
    Bug(
        "selective accuracy answers one less of an odd number",
        "metrics/ranking.py",
        "answered = max(1, math.ceil(coverage * len(correct) - 1e-9))",
        "answered = max(1, math.floor(coverage * len(correct) + 1e-9))",
        "test_metrics",
    ),
    Bug(
        "DeLong's variances are divided by the other side's number",
        "metrics/ranking.py",
        "above_wins.var() / m + below_loses.var() / n",
        "above_wins.var() / n + below_loses.var() / m",
        "test_metrics test_interval_coverage",
    ),
    Bug(
        "the interval of the calibration error is one-sided at its level",
        "metrics/reductions.py",
        "tail, num = 0.5 + 0.5 * confidence_level(level), len(correct)",
        "tail, num = confidence_level(level), len(correct)",
        "test_metrics test_interval_coverage",
    ),
    Bug(
        "repetitions that share rows count as independent",
        "metrics/comparison.py",
        "math.sqrt(1 / num + overlap)",
        "math.sqrt(1 / num)",
        "test_metrics",
    ),
    Bug(
        "balanced accuracy's interval forgets that classes are averaged",
        "metrics/classes.py",
        "        / len(parts) ** 2\n",
        "        / len(parts)\n",
        "test_interval_coverage test_metrics test_class_weight",
    ),
    # --- evaluation
    Bug(
        "outsiders kept are counted at half coverage",
        "evaluation/selective.py",
        "metrics.selective_accuracy(foreign, -doubt, coverage=coverage).value",
        "metrics.selective_accuracy(foreign, -doubt, coverage=0.5).value",
        "test_evaluation test_evaluation_scores",
    ),
    Bug(
        "the worst of noisy scores is chosen and reported on the same half once",
        "evaluation/scoring.py",
        "for chosen_on, reported in (HALVES, HALVES[::-1]):",
        "for chosen_on, reported in (HALVES, HALVES):",
        "test_evaluation test_evaluation_scores",
    ),
    Bug(
        "the norm of a change is recorded without the ball's units",
        "evaluation/run.py",
        "ball.norm(change)\n        if ball is not None\n",
        "ball.norm(change)\n        if ball is not None and ball.scale is None\n",
        "test_evaluation test_evaluation_scores",
    ),
    # --- the audit
    Bug(
        "the audit prints twice the steps that it judged",
        "auditing/strength.py",
        '"steps": steps // 2, case.label',
        '"steps": steps, case.label',
        "test_audit_rules test_audit",
    ),
    Bug(
        "two per cent may be left in the whole box",
        "auditing/strength.py",
        '"E5", left > 0.01, advice',
        '"E5", left > 0.02, advice',
        "test_audit_rules test_audit",
    ),
    Bug(
        "knowing the thetas must not help by more than a point",
        "auditing/others.py",
        '"E14", known - unknown > 2 * POINT + 1e-9',
        '"E14", unknown - known > 2 * POINT + 1e-9',
        "test_audit_rules test_audit",
    ),
    Bug(
        "a control may be much worse than the audited model on clean inputs",
        "auditing/controls.py",
        "if abs(clean - own) > NEAR + 1e-9:",
        "if clean - own > NEAR + 1e-9:",
        "test_audit_rules test_audit test_zoo",
    ),
    Bug(
        "a baseline fails only if both of its figures are behind",
        "auditing/controls.py",
        "bad = clean < published[0] - BEHIND - 1e-9 or left",
        "bad = clean < published[0] - BEHIND - 1e-9 and left",
        "test_audit_rules test_audit",
    ),
    Bug(
        "the Gaussian floor lacks its half",
        "auditing/answers.py",
        "return 0.5 * math.log(2 * math.pi * math.e) + math.log(max(error, 1e-300))",
        "return 0.5 * math.log(2 * math.pi) + math.log(max(error, 1e-300))",
        "test_audit_rules test_audit",
    ),
    # --- store, data sets, training
    Bug(
        "a lock is not waited for",
        "store/lock.py",
        "timeout=self.wait, poll_interval",
        "timeout=0, poll_interval",
        "test_store_files test_files_in_use",
    ),
    Bug(
        "an attacker may say that a value is missing",
        "datasets/encoding.py",
        '(f"{names[index]} missing", False)',
        '(f"{names[index]} missing", True)',
        "test_tables_as_they_come test_datasets",
    ),
    Bug(
        "a file's test share is always a fifth",
        "datasets/own.py",
        "        test_fraction=test_fraction,\n",
        "        test_fraction=0.2,\n",
        "test_datasets test_file_options test_tables_as_they_come",
    ),
    Bug(
        "a batch over the end of a pass takes rows of the same order again",
        "training/batches.py",
        "self._order(epoch + 1)[: self.batch_size - left]",
        "self._order(epoch)[: self.batch_size - left]",
        "test_training test_training_parts test_loaders",
    ),
    # --- command line and report
    Bug(
        "advbayes certify ignores --alpha",
        "cli/certify.py",
        "                alpha=alpha,\n",
        "                alpha=0.001,\n",
        "test_options test_certify test_cli",
    ),
    Bug(
        "advbayes certify's curve counts wrong classes",
        "cli/certify.py",
        "sum(ok and radius >= at for ok, radius",
        "sum(radius >= at for ok, radius",
        "test_readback test_certify test_cli",
    ),
    Bug(
        "advbayes attack ignores --seed",
        "cli/attack.py",
        'predict, method, x, y, seed=seed, key=f"attack/{attack}"',
        'predict, method, x, y, seed=0, key=f"attack/{attack}"',
        "test_options test_cli",
    ),
    Bug(
        "the report's CRPS is not in the target's unit",
        "report/telling.py",
        'len(spread) == 1 and metric in ("rmse", "crps") else 1.0',
        'len(spread) == 1 and metric in ("rmse",) else 1.0',
        "test_report test_readback",
    ),
    Bug(
        "the Markdown report prints the calibration interval's lower end twice",
        "report/markdown.py",
        "({percent(found['low'])} to {percent(found['high'])})",
        "({percent(found['low'])} to {percent(found['low'])})",
        "test_report test_readback",
    ),
    # --- estimators, decisions, conformal prediction
    Bug(
        "an estimator ignores its kl_weight",
        "estimators.py",
        "objective=ChannelELBO(len(x), kl_weight=self.kl_weight),",
        "objective=ChannelELBO(len(x)),",
        "test_estimators test_estimators_complete test_options",
    ),
    Bug(
        "the robust scorer always takes 20 steps",
        "estimators.py",
        "attack = pgd(last.ball_, steps, margin if classes else squared_error)",
        "attack = pgd(last.ball_, 20, margin if classes else squared_error)",
        "test_estimators test_estimators_complete test_options",
    ),
    Bug(
        "an interval of several outputs covers if one of them does",
        "conformal.py",
        "return ((low <= y) & (y <= high)).reshape(len(y), -1).all(1)",
        "return ((low <= y) & (y <= high)).reshape(len(y), -1).any(1)",
        "test_decisions_and_conformal",
    ),
    Bug(
        "worst-case decisions ignore the number of steps",
        "decisions.py",
        "pgd(ball, steps, Worthless(choices, action))",
        "pgd(ball, 20, Worthless(choices, action))",
        "test_decisions_and_conformal",
    ),
)

SLIPS = FIRST
