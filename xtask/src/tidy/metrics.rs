//! Pure: checks that documents, rules and the dashboard name exactly the metrics that the code exports.
//!
//! Names are read from the source text, not from running components: those show a family with labels only after a
//! first count. A registered name has one of two forms there: a whole name as a literal, or the rest of a name after
//! the file's prefix.

use std::collections::{BTreeMap, BTreeSet};

use super::rules::{TidyFinding, before_tests, error};

/// Path of the document that names every metric.
pub(crate) const HANDBOOK: &str = "docs/operations.md";
/// Prefixes of the metrics' names; `kn_` are Knative's own names, kept for its dashboards.
const METRIC_PREFIXES: [&str; 2] = ["rouse_", "kn_"];
/// Labels whose names begin like a metric.
const LABELS: [&str; 3] = ["kn_configuration_name", "kn_revision_name", "kn_service_name"];
/// Suffixes of the series of a histogram.
const HISTOGRAM_SUFFIXES: [&str; 3] = ["_bucket", "_sum", "_count"];
/// Calls whose first argument is the rest of a name, with the suffix that prometheus-client appends.
const REGISTER_CALLS: [(&str, &str); 4] =
    [("register(", ""), ("register_with_unit(", "_seconds"), (" gauge(", ""), (" counter(", "")];

/// Exported metrics: name without the `_total` of counters, and path of the file.
#[derive(Debug, Default)]
pub(crate) struct ExportedMetrics(BTreeMap<String, String>);

impl ExportedMetrics {
    /// Adds the metrics of one source file.
    pub(crate) fn add_file(&mut self, path: &str, text: &str) {
        let code = before_tests(text);
        if !code.contains("prometheus_client") {
            return;
        }
        // A file has one registry with one prefix; whole names need none.
        let prefix = literals_after(code, "with_prefix(").next();
        let mut add = |name: String| drop(self.0.insert(name, path.to_owned()));
        for (call, unit) in REGISTER_CALLS {
            for rest in literals_after(code, call) {
                add(prefix.map_or_else(String::new, |it| format!("{it}_")) + rest + unit);
            }
        }
        // Every second part of the text is a literal; the prefix itself is no metric.
        let whole = code.split('"').skip(1).step_by(2).filter(|it| is_metric_name(it));
        whole.filter(|it| Some(*it) != prefix).for_each(|it| add(it.to_owned()));
    }

    fn contains(&self, named: &str) -> bool {
        self.0.contains_key(named.strip_suffix("_total").unwrap_or(named))
    }
}

/// Checks a document: it names only exported metrics.
pub(crate) fn check_document(
    path: &str,
    text: &str,
    exported: &ExportedMetrics,
) -> Vec<TidyFinding> {
    let is_missing = |(line, name): (usize, &str)| {
        let is_exported = named_series(name).any(|it| exported.contains(it));
        (!is_exported).then(|| {
            error(format!("{path}:{line}"), format!("names {name}, which no part exports"))
        })
    };
    metric_names(text).filter_map(is_missing).collect()
}

/// Checks the handbook: it names every exported metric.
pub(crate) fn check_handbook(text: &str, exported: &ExportedMetrics) -> Vec<TidyFinding> {
    let documented: BTreeSet<&str> =
        metric_names(text).flat_map(|(_, name)| named_series(name)).collect();
    let documented: BTreeSet<&str> =
        documented.iter().map(|it| it.strip_suffix("_total").unwrap_or(it)).collect();
    let missing = exported.0.iter().filter(|(name, _)| !documented.contains(name.as_str()));
    missing
        .map(|(name, from)| error(from, format!("exports {name}, which {HANDBOOK} does not name")))
        .collect()
}

/// Checks rules or a dashboard. Every metric in a query is in the handbook by exactly that name, so that no query
/// uses a counter without `_total`. Names with a colon must be recorded by a rule.
pub(crate) fn check_queries(
    path: &str,
    text: &str,
    handbook: &str,
    recorded: &BTreeSet<&str>,
) -> Vec<TidyFinding> {
    let documented: BTreeSet<&str> = metric_names(handbook).map(|(_, name)| name).collect();
    let queried = metric_names(text)
        .filter(|(_, name)| !named_series(name).any(|it| documented.contains(it)));
    let queried = queried.map(|(line, name)| (line, name, HANDBOOK));
    // By Prometheus' convention, a colon stands only in names that rules record.
    let unrecorded = words(text).filter(|(_, word)| {
        word.contains(':')
            && METRIC_PREFIXES.iter().any(|it| word.starts_with(it.trim_end_matches('_')))
            && !recorded.contains(word)
    });
    let unrecorded = unrecorded.map(|(line, name)| (line, name, "a record of the rules"));
    let missing = |(line, name, place)| {
        error(format!("{path}:{line}"), format!("queries {name}, which is not in {place}"))
    };
    queried.chain(unrecorded).map(missing).collect()
}

/// Names that a file of rules records.
pub(crate) fn recorded_names(rules: &str) -> BTreeSet<&str> {
    rules
        .lines()
        .filter_map(|line| line.trim().trim_start_matches("- ").strip_prefix("record: "))
        .collect()
}

/// A name, and the name of its histogram if it is one of a histogram's series.
fn named_series(name: &str) -> impl Iterator<Item = &str> {
    let histogram = HISTOGRAM_SUFFIXES.iter().filter_map(move |end| name.strip_suffix(end));
    std::iter::once(name).chain(histogram)
}

/// Metrics that a text names, each with its line number.
fn metric_names(text: &str) -> impl Iterator<Item = (usize, &str)> {
    words(text).filter(|(_, word)| is_metric_name(word) && !word.contains(':'))
}

fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == ':';
    let lines = text.lines().enumerate();
    lines.flat_map(move |(index, line)| {
        line.split(move |letter| !is_part(letter))
            .map(move |word| (index + 1, word.trim_end_matches(':')))
    })
}

fn is_metric_name(word: &str) -> bool {
    let plain = |byte: u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_' || byte == b':'
    };
    let has_prefix =
        METRIC_PREFIXES.iter().any(|begin| word.len() > begin.len() && word.starts_with(begin));
    has_prefix && word.bytes().all(plain) && !LABELS.contains(&word) && !word.ends_with('_')
}

/// Literals that are the first argument of `call`.
fn literals_after<'a>(code: &'a str, call: &'a str) -> impl Iterator<Item = &'a str> {
    let after = code.split(call).skip(1);
    after.filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: &str = r#"
use prometheus_client::registry::Registry;
fn register(registry: &mut Registry) {
    let own = registry.sub_registry_with_prefix("rouse_part");
    own.register("events", "Events read", it);
    own.register_with_unit(
        "step",
        help,
    );
    let mut gauge = |name, help, it: &Gauge| own.register(name, help, it.clone());
    gauge("open_ports", "Ports", &it);
    encode("kn_revision_pods_count", &[("kn_revision_name", name)]);
}
"#;

    fn exported() -> ExportedMetrics {
        let mut exported = ExportedMetrics::default();
        exported.add_file("part/src/admin.rs", CODE);
        exported
    }

    fn messages(findings: &[TidyFinding]) -> Vec<String> {
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn names_are_read_with_their_prefix_and_unit_or_whole() {
        let names: Vec<String> = exported().0.into_keys().collect();
        let expected = [
            "kn_revision_pods_count",
            "rouse_part_events",
            "rouse_part_open_ports",
            "rouse_part_step_seconds",
        ];
        assert_eq!(names, expected);
        let mut other = ExportedMetrics::default();
        other.add_file("part/src/other.rs", "let path = \"rouse_part\";");
        assert!(other.0.is_empty(), "no metrics are made there");
    }

    #[test]
    fn a_document_may_name_a_counter_and_the_series_of_a_histogram() {
        let text = "`rouse_part_events_total` and `rouse_part_step_seconds_bucket{le=\"1\"}`,\nnot rouse_part_gone";
        let expected = ["error: docs/a.md:2: names rouse_part_gone, which no part exports"];
        assert_eq!(messages(&check_document("docs/a.md", text, &exported())), expected);
    }

    #[test]
    fn the_handbook_must_name_every_metric() {
        let text = "rouse_part_events_total rouse_part_open_ports kn_revision_pods_count";
        let expected = [
            "error: part/src/admin.rs: exports rouse_part_step_seconds, which docs/operations.md does not name",
        ];
        assert_eq!(messages(&check_handbook(text, &exported())), expected);
    }

    #[test]
    fn a_query_asks_for_names_as_the_handbook_has_them() {
        let handbook = "rouse_part_events_total rouse_part_step_seconds";
        let rules = "- record: rouse:step:p99\n  expr: rouse_part_step_seconds_bucket + rate(rouse_part_events[1m])\n- alert: A\n  expr: rouse:step:p50 > rouse:step:p99\n";
        let recorded = recorded_names(rules);
        let expected = [
            "error: r.yaml:2: queries rouse_part_events, which is not in docs/operations.md",
            "error: r.yaml:4: queries rouse:step:p50, which is not in a record of the rules",
        ];
        assert_eq!(messages(&check_queries("r.yaml", rules, handbook, &recorded)), expected);
    }
}
