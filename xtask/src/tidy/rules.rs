//! Pure: the layout rules, each a function from text to findings.

use std::fmt;

/// Crates of the workspace that each crate may import. A component never imports another component.
const ALLOWED_IMPORTS: [(&str, &[&str]); 16] = [
    ("datapath", &[]),
    ("common", &[]),
    ("registry", &[]),
    ("watches", &[]),
    ("ebpf", &["datapath"]),
    ("agent", &["datapath", "common", "watches"]),
    // `streams` judges its tests.
    ("activator", &["datapath", "common", "streams"]),
    ("activator-loopback", &["datapath", "common", "activator", "streams"]),
    ("autoscaler", &["common"]),
    ("controller", &["datapath", "common", "registry", "watches"]),
    ("local", &["common", "registry"]),
    ("streams", &["datapath"]),
    ("rouse", &["common", "agent", "activator", "autoscaler", "controller", "local"]),
    (
        "tests",
        &[
            "datapath",
            "common",
            "registry",
            "agent",
            "activator",
            "autoscaler",
            "controller",
            "local",
            "rouse",
        ],
    ),
    ("xtask", &[]),
    ("hello", &[]),
];

/// Names that a `Pure:` file may not use: I/O, clocks, the environment, random values. The controller has a module
/// `kube` of its own, so only imports of the crate `kube` are listed. Imports of `kube::core` are not: they are plain
/// types.
const IMPURE_NAMES: [&str; 17] = [
    "tokio::",
    "hyper::",
    "aya::",
    "use kube::{",
    "use kube::Api",
    "use kube::Client",
    "use kube::client",
    "use kube::runtime",
    "axum::",
    "tonic::transport",
    "rand::",
    "std::env",
    "std::fs",
    "std::process",
    "Instant::now",
    "SystemTime",
    "TcpStream",
];

/// Files that may contain `unsafe`, beside all of `ebpf/`.
const UNSAFE_FILES: [&str; 5] = [
    "datapath/src/abi.rs",
    "datapath/src/words.rs",
    "agent/src/kernel/sys.rs",
    "local/src/sys.rs",
    "tests/kernel/sys.rs",
];

/// Number of lines before the tests above which a file gets a warning.
const WARNING_LINES: usize = 400;
/// Number of lines before the tests above which a file must be split.
const MAX_LINES: usize = 800;

/// One source file of the workspace.
#[derive(Debug)]
pub(crate) struct SourceFile<'a> {
    /// Name of its crate.
    pub(crate) krate: &'a str,
    /// Path from the root of the workspace.
    pub(crate) path: &'a str,
    /// Content of the file.
    pub(crate) text: &'a str,
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FindingSeverity {
    Warning,
    Error,
}

/// One violation of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TidyFinding {
    pub(crate) severity: FindingSeverity,
    /// Location, as `path` or `path:line`.
    pub(crate) location: String,
    pub(crate) message: String,
}

impl fmt::Display for TidyFinding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.severity {
            FindingSeverity::Warning => "warning",
            FindingSeverity::Error => "error",
        };
        write!(out, "{word}: {}: {}", self.location, self.message)
    }
}

pub(crate) fn error(location: impl Into<String>, message: impl Into<String>) -> TidyFinding {
    let (location, message) = (location.into(), message.into());
    TidyFinding { severity: FindingSeverity::Error, location, message }
}

fn warning(location: impl Into<String>, message: impl Into<String>) -> TidyFinding {
    let (location, message) = (location.into(), message.into());
    TidyFinding { severity: FindingSeverity::Warning, location, message }
}

/// Checks one import of a crate of the workspace by another.
pub(crate) fn check_import(from: &str, to: &str) -> Option<TidyFinding> {
    let location = format!("{from}/Cargo.toml");
    match ALLOWED_IMPORTS.iter().find(|(name, _)| *name == from) {
        None => Some(error(
            location,
            format!("crate {from} has no line in ALLOWED_IMPORTS of xtask/src/tidy/rules.rs"),
        )),
        Some((_, allowed)) if allowed.contains(&to) => None,
        Some(_) => Some(error(
            location,
            format!("{from} must not import {to}: move what both need to common or datapath"),
        )),
    }
}

/// Checks one source file against all rules.
pub(crate) fn check_source(file: &SourceFile<'_>) -> Vec<TidyFinding> {
    let mut findings = Vec::new();
    findings.extend(check_purpose_line(file));
    findings.extend(check_length(file));
    findings.extend(check_doc_fences(file));
    let code = code_lines(file.text);
    if file.text.starts_with("//! Pure:") {
        findings.extend(code.iter().filter_map(|line| check_purity(file.path, line)));
    }
    if file.krate != "ebpf" && !UNSAFE_FILES.contains(&file.path) {
        let is_unsafe = |line: &&CodeLine<'_>| words(line.code).any(|word| word == "unsafe");
        findings.extend(code.iter().filter(is_unsafe).map(|line| {
            let location = format!("{}:{}", file.path, line.number);
            error(
                location,
                "only ebpf/, datapath/src/{abi,words}.rs and the sys.rs files may contain unsafe",
            )
        }));
    }
    findings
}

/// Checks the first line: the file's purpose, and `Pure:` or `Shell:`.
fn check_purpose_line(file: &SourceFile<'_>) -> Option<TidyFinding> {
    // A `tests.rs` belongs to the module that it tests.
    if file.path.ends_with("/tests.rs") {
        return None;
    }
    let first = file.text.lines().next().unwrap_or_default();
    if !first.starts_with("//! ") {
        return Some(error(file.path, "the first line must be a `//!` doc line"));
    }
    let name = file.path.rsplit('/').next().unwrap_or_default();
    // The doc of a crate root is about the crate. eBPF programs are neither kind. Tests are sorted by what they test.
    let exempt = matches!(name, "lib.rs" | "main.rs" | "build.rs")
        || file.krate == "ebpf"
        || file.krate == "tests"
        || file.path.contains("/tests/")
        || file.path.contains("/benches/");
    if exempt || first.starts_with("//! Pure: ") || first.starts_with("//! Shell: ") {
        return None;
    }
    Some(error(file.path, "the first line must start with `//! Pure: ` or `//! Shell: `"))
}

fn check_length(file: &SourceFile<'_>) -> Option<TidyFinding> {
    if file.path.ends_with("/tests.rs") {
        return None;
    }
    let lines = before_tests(file.text).lines().count();
    if lines > MAX_LINES {
        let message = format!("{lines} lines before the tests; above {MAX_LINES} it must be split");
        return Some(error(file.path, message));
    }
    let message =
        format!("{lines} lines before the tests; above {WARNING_LINES} look for a second subject");
    (lines > WARNING_LINES).then(|| warning(file.path, message))
}

/// Checks that fenced blocks in documentation comments are text. No test runs code there: each library would be built a
/// second time for it, with other features of its crates.
fn check_doc_fences(file: &SourceFile<'_>) -> Vec<TidyFinding> {
    let mut findings = Vec::new();
    let mut is_open = false;
    for (number, line) in (1..).zip(file.text.lines()) {
        let doc = line.trim_start();
        let doc = doc.strip_prefix("//! ").or_else(|| doc.strip_prefix("/// "));
        let Some(language) = doc.and_then(|it| it.trim_start().strip_prefix("```")) else {
            continue;
        };
        if !is_open && language.trim() != "text" {
            let message =
                "code in documentation is not tested; write a test, or name the fence `text`";
            findings.push(error(format!("{}:{number}", file.path), message));
        }
        is_open = !is_open;
    }
    findings
}

fn check_purity(path: &str, line: &CodeLine<'_>) -> Option<TidyFinding> {
    let named = IMPURE_NAMES.iter().find(|name| {
        // Not in the middle of a longer name, such as `my_tokio::`.
        let is_named = line.code.match_indices(*name).any(|(at, _)| {
            !line.code[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_')
        });
        // `abi.rs` implements aya's trait `Pod` (plain old data) for the values of maps, which is no I/O.
        is_named && !(**name == "aya::" && path == "datapath/src/abi.rs")
    })?;
    let location = format!("{path}:{}", line.number);
    Some(error(
        location,
        format!("a Pure: file names `{named}`; pass the value in, or move this to a Shell: file"),
    ))
}

/// Checks the relative links of a document, which start at its directory, and the file names in backticks, which
/// start at the root.
pub(crate) fn check_document(
    path: &str,
    text: &str,
    exists: impl Fn(&str) -> bool,
) -> Vec<TidyFinding> {
    let mut findings = Vec::new();
    let folder = path.rsplit_once('/').map_or_else(String::new, |(folder, _)| format!("{folder}/"));
    for (index, line) in text.lines().enumerate() {
        // Markdown links `[text](target)`; links to other sites and within the page are not checked.
        let links = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let links = links.filter(|link| !link.contains("://") && !link.starts_with('#'));
        let quoted = line.split('`').skip(1).step_by(2).filter(|word| is_file_name(word));
        for target in links.map(|it| format!("{folder}{it}")).chain(quoted.map(str::to_owned)) {
            let file = target.split('#').next().unwrap_or_default();
            if !exists(file) {
                let location = format!("{path}:{}", index + 1);
                findings.push(error(location, format!("names {file}, which does not exist")));
            }
        }
    }
    findings
}

/// Returns true if a word in backticks is a path of the repository, such as `agent/src/routes/plan.rs`.
fn is_file_name(word: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-".contains(&byte);
    word.ends_with(".rs") && word.contains('/') && word.bytes().all(plain)
}

/// A line of code without its comment.
#[derive(Debug)]
struct CodeLine<'a> {
    number: usize,
    code: &'a str,
}

/// Lines of code outside the test module, without comments. Line numbers are exact for code formatted by rustfmt.
fn code_lines(text: &str) -> Vec<CodeLine<'_>> {
    before_tests(text)
        .lines()
        .enumerate()
        .map(|(index, line)| CodeLine { number: index + 1, code: strip(line) })
        .filter(|line| !line.code.trim().is_empty())
        .collect()
}

/// Text before the inline test module, which ends its file. A declaration such as `mod tests;` does not end the text:
/// code follows it.
pub(crate) fn before_tests(text: &str) -> &str {
    const TEST_MODULE: &str = "\n#[cfg(test)]\nmod ";
    let is_inline = |at: &usize| {
        text[at + TEST_MODULE.len()..].lines().next().is_some_and(|line| line.contains('{'))
    };
    let end = text.match_indices(TEST_MODULE).map(|(at, _)| at).find(is_inline);
    &text[..end.unwrap_or(text.len())]
}

/// Cuts off a comment, and everything from the first string literal, because messages may contain any word.
pub(crate) fn strip(line: &str) -> &str {
    let end = [line.find("//"), line.find('"')].into_iter().flatten().min();
    &line[..end.unwrap_or(line.len())]
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn locations(findings: &[TidyFinding]) -> Vec<&str> {
        findings.iter().map(|finding| finding.location.as_str()).collect()
    }

    fn check(path: &str, text: &str) -> Vec<String> {
        let krate = path.split('/').next().unwrap();
        let findings = check_source(&SourceFile { krate, path, text });
        locations(&findings).into_iter().map(str::to_owned).collect()
    }

    #[test]
    fn a_component_may_import_common_and_no_other_component() {
        assert_eq!(check_import("agent", "common"), None);
        assert!(check_import("agent", "controller").is_some());
        assert!(check_import("unknown", "common").is_some());
    }

    #[test]
    fn a_pure_file_must_not_name_a_clock_outside_tests_and_comments() {
        let text = "//! Pure: x\n// Instant::now is the caller's\nlet a = Instant::now();\n\n#[cfg(test)]\nmod tests { Instant::now() }\n";
        assert_eq!(check("agent/src/routes/plan.rs", text), ["agent/src/routes/plan.rs:3"]);
    }

    #[test]
    fn code_after_the_declaration_of_a_test_module_is_checked() {
        let text = "//! Pure: x\n\n#[cfg(test)]\nmod tests;\n\nlet a = Instant::now();\n";
        assert_eq!(check("agent/src/routes/plan.rs", text), ["agent/src/routes/plan.rs:6"]);
    }

    #[test]
    fn a_longer_name_is_not_the_forbidden_one() {
        assert_eq!(check("agent/src/routes/plan.rs", "//! Pure: x\nuse my_tokio::X;\n"), [""; 0]);
    }

    #[test]
    fn unsafe_is_found_outside_the_allowed_files_only() {
        let text = "//! Shell: x\n#![forbid(unsafe_code)]\nlet a = unsafe { b };\n";
        assert_eq!(check("agent/src/kernel/maps.rs", text), ["agent/src/kernel/maps.rs:3"]);
        assert_eq!(check("agent/src/kernel/sys.rs", text), [""; 0]);
        assert_eq!(check("ebpf/src/count.rs", text), [""; 0]);
    }

    #[test]
    fn every_file_needs_a_purpose_line() {
        assert_eq!(check("agent/src/a.rs", "use x;\n"), ["agent/src/a.rs"]);
        assert_eq!(check("agent/src/a.rs", "//! Something.\n"), ["agent/src/a.rs"]);
        assert_eq!(check("agent/src/lib.rs", "//! Something.\n"), [""; 0]);
    }

    #[test]
    fn code_in_documentation_is_refused_because_no_test_runs_it() {
        let text = "//! Pure: x\n//! ```text\n//! a\n//! ```\n//! ```\n//! a();\n//! ```\n    /// ```rust\n    /// ```\n";
        assert_eq!(check("agent/src/a.rs", text), ["agent/src/a.rs:5", "agent/src/a.rs:8"]);
    }

    #[test]
    fn a_file_is_warned_above_400_lines_and_refused_above_800() {
        let file_of = |lines: usize| "//! Pure: x\n".to_owned() + &"a\n".repeat(lines);
        let severity = |lines| {
            let text = file_of(lines);
            check_source(&SourceFile { krate: "agent", path: "agent/src/a.rs", text: &text })
                .first()
                .map(|finding| finding.severity)
        };
        assert_eq!(severity(399), None);
        assert_eq!(severity(400), Some(FindingSeverity::Warning));
        assert_eq!(severity(800), Some(FindingSeverity::Error));
    }

    #[test]
    fn a_document_must_not_name_files_that_are_gone() {
        let text =
            "see `agent/src/routes/plan.rs` and [there](gone.md#part), not [this](http://x/)\n";
        let findings = check_document("README.md", text, |name| name == "agent/src/routes/plan.rs");
        assert_eq!(findings, [error("README.md:1", "names gone.md, which does not exist")]);
        let below = check_document(
            "docs/a.md",
            "[b](b.md#part) [up](../README.md) `agent/src/routes/plan.rs`",
            |name| ["docs/b.md", "docs/../README.md", "agent/src/routes/plan.rs"].contains(&name),
        );
        assert_eq!(below, []);
    }
}
