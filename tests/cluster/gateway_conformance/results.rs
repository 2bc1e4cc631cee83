//! Results of upstream's conformance tests, and their tables in Markdown.

use std::collections::BTreeMap;

use serde_json::Value;

/// Result of one test of the suite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SuiteTest {
    /// Name of the test in the suite.
    pub(super) name: String,
    /// Outcome of the test.
    pub(super) outcome: SuiteOutcome,
    /// Features that an implementation needs for the test.
    features: Vec<String>,
    /// Features among them that Rouse does not claim, because of which the suite has skipped the test.
    unsupported: Vec<String>,
}

/// Outcome of a test of the suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SuiteOutcome {
    Passed,
    /// The test failed, or the suite ended before it.
    Failed,
    Skipped,
}

/// Parses the results that the suite's program has written, and sorts them by the names of the tests.
pub(super) fn parse_results(text: &str) -> Vec<SuiteTest> {
    let results: Value = serde_json::from_str(text).expect("the results are JSON");
    let results = results.as_array().expect("there is a list of results");
    let mut tests: Vec<SuiteTest> = results.iter().map(parse_result).collect();
    tests.sort_by(|one, other| one.name.cmp(&other.name));
    tests
}

fn parse_result(result: &Value) -> SuiteTest {
    let texts = |field: &str| -> Vec<String> {
        let items = result[field].as_array().into_iter().flatten();
        items.filter_map(|it| it.as_str().map(str::to_owned)).collect()
    };
    SuiteTest {
        name: result["name"].as_str().expect("a test has a name").to_owned(),
        outcome: match result["result"].as_str() {
            Some("passed") => SuiteOutcome::Passed,
            Some("failed" | "missing") => SuiteOutcome::Failed,
            Some("skipped") => SuiteOutcome::Skipped,
            _ => panic!("an unknown result: {result}"),
        },
        features: texts("features"),
        unsupported: texts("unsupported"),
    }
}

/// Formats the tables: results by feature, and of each test. `known_failures` has names of tests with reasons.
pub(super) fn format_tables(tests: &[SuiteTest], known_failures: &[(&str, &str)]) -> String {
    let numbers = count_outcomes(tests.iter());
    let mut text = format!(
        "Conformance tests of the Gateway API, as `cargo xtask conformance` runs them: {}.\n\n\
         | feature | passed | failed | skipped |\n|---|---|---|---|\n",
        numbers.describe()
    );
    let mut by_feature: BTreeMap<&str, Vec<&SuiteTest>> = BTreeMap::new();
    for test in tests {
        for feature in &test.features {
            by_feature.entry(feature).or_default().push(test);
        }
    }
    for (feature, tests) in by_feature {
        let OutcomeNumbers { passed, failed, skipped } = count_outcomes(tests.into_iter());
        text += &format!("| {feature} | {passed} | {failed} | {skipped} |\n");
    }
    text += "\n| test | result |\n|---|---|\n";
    for test in tests {
        text += &format!("| {} | {} |\n", test.name, describe_outcome(test, known_failures));
    }
    text
}

fn describe_outcome(test: &SuiteTest, known_failures: &[(&str, &str)]) -> String {
    let reason = known_failures.iter().find(|(name, _)| *name == test.name);
    match (test.outcome, reason) {
        (SuiteOutcome::Passed, None) => "passed".to_owned(),
        (SuiteOutcome::Passed, Some(_)) => "passed, although its failure is known".to_owned(),
        (SuiteOutcome::Failed, None) => "**failed**".to_owned(),
        (SuiteOutcome::Failed, Some((_, reason))) => format!("failed: {reason}"),
        (SuiteOutcome::Skipped, _) if test.unsupported.is_empty() => "skipped".to_owned(),
        (SuiteOutcome::Skipped, _) => format!("skipped: no {}", test.unsupported.join(", ")),
    }
}

/// Numbers of tests by their outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OutcomeNumbers {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl OutcomeNumbers {
    fn describe(self) -> String {
        let Self { passed, failed, skipped } = self;
        format!("{passed} passed, {failed} failed, {skipped} skipped")
    }
}

fn count_outcomes<'a>(tests: impl Iterator<Item = &'a SuiteTest>) -> OutcomeNumbers {
    let mut numbers = OutcomeNumbers::default();
    for test in tests {
        *match test.outcome {
            SuiteOutcome::Passed => &mut numbers.passed,
            SuiteOutcome::Failed => &mut numbers.failed,
            SuiteOutcome::Skipped => &mut numbers.skipped,
        } += 1;
    }
    numbers
}

#[test]
fn results_are_read_and_counted_by_feature() {
    let text = r#"[
        {"name": "Weight", "features": ["Gateway", "HTTPRoute"], "unsupported": null, "result": "passed"},
        {"name": "Matching", "features": ["Gateway"], "unsupported": null, "result": "failed"},
        {"name": "Mirror", "features": ["Gateway", "Mirror"], "unsupported": ["Mirror"], "result": "skipped"},
        {"name": "Types", "features": ["HTTPRoute"], "unsupported": null, "result": "missing"}
    ]"#;
    // A result that is missing counts as a failure: the suite may have ended before the test.
    let tests = parse_results(text);
    let outcomes: Vec<(&str, SuiteOutcome)> =
        tests.iter().map(|it| (it.name.as_str(), it.outcome)).collect();
    assert_eq!(
        outcomes,
        [
            ("Matching", SuiteOutcome::Failed),
            ("Mirror", SuiteOutcome::Skipped),
            ("Types", SuiteOutcome::Failed),
            ("Weight", SuiteOutcome::Passed),
        ]
    );
    let tables = format_tables(&tests, &[("Types", "headless"), ("Weight", "no scales")]);
    let expected = "Conformance tests of the Gateway API, as `cargo xtask conformance` runs them: \
                    1 passed, 2 failed, 1 skipped.\n\n\
                    | feature | passed | failed | skipped |\n|---|---|---|---|\n\
                    | Gateway | 1 | 1 | 1 |\n\
                    | HTTPRoute | 1 | 1 | 0 |\n\
                    | Mirror | 0 | 0 | 1 |\n\n\
                    | test | result |\n|---|---|\n\
                    | Matching | **failed** |\n\
                    | Mirror | skipped: no Mirror |\n\
                    | Types | failed: headless |\n\
                    | Weight | passed, although its failure is known |\n";
    assert_eq!(tables, expected);
}
