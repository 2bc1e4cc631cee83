//! Pure: figures as JSON for programs and as a section of BENCHMARKS.md for readers.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::stats::{MedianInterval, RoundValues, median, quantile, ratio, sorted};
use crate::machine::MachineInfo;

/// Figures of one bench, with the machine they were measured on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct BenchReport {
    pub(super) name: String,
    #[serde(flatten)]
    pub(super) machine: MachineInfo,
    /// Facts that a reader needs to understand the figures, beyond the names of the cases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) note: Option<String>,
    pub(super) rows: Vec<BenchRow>,
}

/// Notes of benches by their names.
const NOTES: [(&str, &str); 1] = [(
    "gateway",
    "Each proxy has one core for itself. Clients and pods share another one, which limits the faster proxies: so \
     `req/s/core` counts requests for each second in which the proxy's core was busy. `_seen` is the rate at the client, \
     and `_client_core` the share of time in which the clients' core was busy.",
)];

impl BenchReport {
    /// Makes the report of the bench `name`, with its note.
    pub(super) fn new(name: &str, machine: MachineInfo, rows: Vec<BenchRow>) -> Self {
        let note = NOTES.iter().find(|(bench, _)| *bench == name);
        let note = note.map(|(_, note)| (*note).to_owned());
        Self { name: name.to_owned(), machine, note, rows }
    }
}

/// Figures of one subject in one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct BenchRow {
    pub(super) case: String,
    pub(super) subject: String,
    pub(super) unit: String,
    pub(super) p50: f64,
    pub(super) p90: f64,
    pub(super) p99: f64,
    pub(super) n: usize,
    /// Ratio to the control within each round: median and the bounds of its 95 % interval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) ratio: Option<[f64; 3]>,
    /// Goal in words, for example `≤ 5 ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) goal: Option<String>,
    /// True if the goal was reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) reached: Option<bool>,
}

/// Bound that a figure must not cross.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum BenchGoal {
    /// Highest ratio to the control.
    RatioAtMost(f64),
    /// Lowest ratio to the control.
    RatioAtLeast(f64),
    /// Highest median of the values themselves.
    AtMost(f64),
    /// Lowest median of the values themselves.
    AtLeast(f64),
    /// Highest median, and highest 99th percentile.
    P50P99AtMost(f64, f64),
    /// Highest 99th percentile of the values.
    P99AtMost(f64),
    /// No goal: the figure is only shown.
    None,
}

/// Subjects that others are compared with: the pod's address without programs, or the same pod with programs
/// detached. No bench has both.
const CONTROLS: [&str; 2] = ["bare", "off"];

/// Ratio of a subject to its control.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ControlRatio {
    control: &'static str,
    ratio: MedianInterval,
}

/// Name of the control among `subjects`.
fn find_control<'a>(subjects: impl Iterator<Item = &'a str>) -> &'static str {
    let subjects: Vec<&str> = subjects.collect();
    CONTROLS.into_iter().find(|control| subjects.contains(control)).unwrap_or(CONTROLS[0])
}

/// Rows of one case: the rounds of each subject, with ratios to the control. The goal is for `rouse` alone.
pub(super) fn case_rows(
    case: &str,
    unit: &str,
    rounds: &RoundValues,
    goal: BenchGoal,
) -> Vec<BenchRow> {
    let control = find_control(rounds.keys().copied());
    rounds
        .iter()
        .map(|(subject, values)| {
            let ratio = (*subject != control).then(|| ratio(rounds, subject, control)).flatten();
            let ratio = ratio.map(|ratio| ControlRatio { control, ratio });
            let goal = if *subject == "rouse" { goal } else { BenchGoal::None };
            compared_row(case, subject, unit, values, ratio, goal)
        })
        .collect()
}

/// Makes one row without a ratio to a control.
pub(super) fn case_row(
    case: &str,
    subject: &str,
    unit: &str,
    values: &[f64],
    goal: BenchGoal,
) -> BenchRow {
    compared_row(case, subject, unit, values, None, goal)
}

/// Makes one row. Goals are judged by medians, not by the best value.
fn compared_row(
    case: &str,
    subject: &str,
    unit: &str,
    values: &[f64],
    ratio: Option<ControlRatio>,
    goal: BenchGoal,
) -> BenchRow {
    let sorted = sorted(values);
    let p99 = quantile(&sorted, 0.99);
    let p50 = median(values).value;
    let (against, control) =
        ratio.map_or((f64::NAN, CONTROLS[0]), |it| (it.ratio.value, it.control));
    // A missing ratio is NaN, with which every comparison fails: such a goal is not reached.
    let (goal, reached) = match goal {
        BenchGoal::RatioAtMost(max) => (format!("≤ {max} × {control}"), against <= max),
        BenchGoal::RatioAtLeast(min) => (format!("≥ {min} × {control}"), against >= min),
        BenchGoal::AtMost(max) => (format!("≤ {max} {unit}"), p50 <= max),
        BenchGoal::AtLeast(min) => (format!("≥ {min} {unit}"), p50 >= min),
        BenchGoal::P50P99AtMost(max_p50, max_p99) => {
            (format!("p50 ≤ {max_p50}, p99 ≤ {max_p99} {unit}"), p50 <= max_p50 && p99 <= max_p99)
        }
        BenchGoal::P99AtMost(max) => (format!("p99 ≤ {max} {unit}"), p99 <= max),
        BenchGoal::None => (String::new(), true),
    };
    let has_goal = !goal.is_empty();
    BenchRow {
        case: case.to_owned(),
        subject: subject.to_owned(),
        unit: unit.to_owned(),
        p50,
        p90: quantile(&sorted, 0.9),
        p99,
        n: values.len(),
        ratio: ratio.map(|it| [it.ratio.value, it.ratio.low, it.ratio.high]),
        goal: has_goal.then_some(goal),
        reached: has_goal.then_some(reached),
    }
}

/// Formats the report as a section of BENCHMARKS.md.
pub(super) fn markdown_section(report: &BenchReport) -> String {
    let BenchReport { name, machine, note, rows } = report;
    let mut out = format!(
        "## {name}\n\n`cargo xtask bench {name}` · {} · Linux {} · commit {}\n\n",
        machine.machine, machine.kernel, machine.commit
    );
    if let Some(note) = note {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{note}\n");
    }
    let control = find_control(rows.iter().map(|row| row.subject.as_str()));
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "| case | subject | p50 | p90 | p99 | unit | n | ratio to {control} (95 %) | to reach | reached |"
    );
    out += "|---|---|---|---|---|---|---|---|---|---|\n";
    for row in rows {
        let ratio = row.ratio.map_or_else(String::new, |[value, low, high]| {
            format!("{value:.3} ({low:.3}–{high:.3})")
        });
        let reached = match row.reached {
            Some(true) => "yes",
            Some(false) => "**no**",
            None => "",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {} | {ratio} | {} | {reached} |",
            row.case,
            row.subject,
            format_significant(row.p50),
            format_significant(row.p90),
            format_significant(row.p99),
            row.unit,
            row.n,
            row.goal.as_deref().unwrap_or_default(),
        );
    }
    out
}

/// Formats with three significant digits, which is more precise than any of these measurements.
fn format_significant(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Returns `document` with the section `name` replaced, or appended if there is none.
pub(super) fn replace_section(document: &str, name: &str, section: &str) -> String {
    // Sections begin at headings of the second level; the first part is the introduction.
    let mut sections: Vec<&str> = document.split("\n## ").collect();
    let heading = format!("{name}\n");
    let body = section.trim_start_matches("## ").trim_end();
    match sections.iter_mut().skip(1).find(|part| part.starts_with(&heading)) {
        Some(part) => *part = body,
        None => sections.push(body),
    }
    let sections: Vec<&str> = sections.into_iter().map(str::trim_end).collect();
    sections.join("\n\n## ") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_is_judged_by_the_median_ratio_of_rouse_only() {
        let rounds = RoundValues::from([
            ("bare", vec![100.0, 100.0, 100.0]),
            ("rouse", vec![101.0, 104.0, 110.0]),
        ]);
        let rows = case_rows("services_1", "us", &rounds, BenchGoal::RatioAtMost(1.05));
        let judged: Vec<_> = rows.iter().map(|row| (row.subject.as_str(), row.reached)).collect();
        assert_eq!(judged, [("bare", None), ("rouse", Some(true))]);
    }

    #[test]
    fn rouse_is_compared_with_detached_programs_if_a_bench_has_that_control() {
        let rounds = RoundValues::from([("off", vec![100.0]), ("rouse", vec![98.0])]);
        let rows = case_rows("req_s_h1", "req/s", &rounds, BenchGoal::RatioAtLeast(0.97));
        assert_eq!(rows[0].ratio, None);
        assert_eq!(rows[1].goal.as_deref(), Some("≥ 0.97 × off"));
        assert_eq!(rows[1].reached, Some(true));
        let machine =
            MachineInfo { machine: String::new(), kernel: String::new(), commit: String::new() };
        let section = markdown_section(&BenchReport::new("count", machine, rows));
        assert!(section.contains("| ratio to off (95 %) |"), "{section}");
    }

    #[test]
    fn a_note_stands_between_the_machine_and_the_table() {
        let machine = MachineInfo { machine: "m".into(), kernel: "k".into(), commit: "c".into() };
        let report = BenchReport::new("gateway", machine, Vec::new());
        let note = report.note.clone().unwrap();
        let head = format!("Linux k · commit c\n\n{note}\n\n| case |");
        let section = markdown_section(&report);
        assert!(section.contains(&head), "{section}");
    }

    #[test]
    fn a_section_is_replaced_and_its_neighbours_stay() {
        let document = "# Benchmarks\n\nwords\n\n## wake\n\nold\n\n## warm\n\nstays\n";
        let new = replace_section(document, "wake", "## wake\n\nnew\n");
        assert_eq!(new, "# Benchmarks\n\nwords\n\n## wake\n\nnew\n\n## warm\n\nstays\n");
        let appended = replace_section("# B\n", "idle", "## idle\n\nx\n");
        assert_eq!(appended, "# B\n\n## idle\n\nx\n");
    }
}
