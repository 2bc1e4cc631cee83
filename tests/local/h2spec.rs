//! h2spec at the gateway, without TLS and over it: the cases that fail are exactly the known ones.

use std::{collections::BTreeSet, fs, net::SocketAddr, path::Path, process::Command};

use tests::{
    http_client, rouse_node::RouseNode, test_cluster::required_variable, tls_files::TlsFiles,
};

const HELLO: &str = include_str!("../../examples/hello.yaml");
const HOST: &str = "h2spec.default.localhost";
/// Number of cases of h2spec 2.2.1 with `--strict`. A case that could not run would be missing in the report.
const CASES: usize = 146;

/// Reason for the cases of RFC 7541, section 4.2. A client that knows this setting must not set a larger size.
const NO_TABLE: &str =
    "the gateway keeps no table for header fields (SETTINGS_HEADER_TABLE_SIZE 0)";
/// Cases that fail over both transports, as `http2/6.5.3: Sends …`, each with the reason why that is accepted.
const KNOWN_FAILURES: [(&str, &str); 2] = [
    ("generic/5: Sends a dynamic table size update", NO_TABLE),
    ("generic/5: Sends multiple dynamic table size update", NO_TABLE),
];
/// Cases that fail without TLS only.
const KNOWN_FAILURES_WITHOUT_TLS: [(&str, &str); 1] = [(
    "http2/3.5: Sends invalid connection preface",
    "the port speaks HTTP/1.1 too, so other bytes than the preface get its 400 before the end",
)];

/// Case of a report: its section with its description, and true if it has failed.
type ReportedCase = (String, bool);

/// Runs h2spec against an address, to which `HOST` resolves for it alone, and returns the cases of its report.
fn run_h2spec(folder: &Path, gateway: SocketAddr, more: &[&str]) -> Vec<ReportedCase> {
    let (hosts, report) = (folder.join("hosts"), folder.join("report.xml"));
    fs::write(&hosts, format!("{} {HOST}\n", gateway.ip())).expect("a file");
    let _absent = fs::remove_file(&report);
    let h2spec = Path::new(&required_variable("ROUSE_SERVERS")).join("h2spec");
    let port = gateway.port().to_string();
    // h2spec takes its authority from the name that it connects to, and no DNS knows this one.
    let script = "mount --bind \"$1\" /etc/hosts && shift && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(&hosts).arg(h2spec);
    command.args(["--host", HOST, "--port", &port, "--strict"]).args(more);
    command.arg("--junit-report").arg(&report);
    // It ends with an error if a case has failed, and the report has all cases in any way.
    let output = command.output().expect("unshare is installed");
    let text = fs::read_to_string(&report).unwrap_or_else(|error| {
        panic!("{error}: {output:?}");
    });
    parse_report(&text)
}

/// Parses the report in JUnit's format, which has one element for each case.
fn parse_report(report: &str) -> Vec<ReportedCase> {
    let value = |text: &str, name: &str| {
        let behind = text.split_once(&format!("{name}=\"")).map(|(_, behind)| behind);
        let value = behind.and_then(|behind| behind.split('"').next()).unwrap_or_default();
        // The escapes that Go's encoder writes within attributes.
        let escapes =
            [("&#34;", "\""), ("&#39;", "'"), ("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")];
        escapes.iter().fold(value.to_owned(), |text, (from, to)| text.replace(from, to))
    };
    let cases = report.split("<testcase ").skip(1).map(|case| {
        let has_failed = ["<error>", "<failure>", "<skipped>"].iter().any(|it| case.contains(it));
        (format!("{}: {}", value(case, "package"), value(case, "classname")), has_failed)
    });
    cases.collect()
}

#[test]
fn only_known_cases_of_h2spec_fail_at_the_gateway() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = TlsFiles::new(folder.path(), &["*.default.localhost"]);
    let node = RouseNode::start_with_tls("h2spec", &files);
    let tls_gateway = node.tls_gateway.expect("it was started with certificates");
    // With a pod that stays: h2spec waits two seconds for each response.
    let annotations = "max-scale: \"8\"\n        autoscaling.knative.dev/min-scale: \"1\"";
    let manifest = HELLO.replace("name: hello", "name: h2spec");
    assert!(node.apply(&manifest.replace("max-scale: \"8\"", annotations)).0);
    node.wait_ready("h2spec");
    let response = http_client::get(node.gateway, HOST, "/").expect("the gateway responds");
    assert_eq!(response.status, 200);
    let runs = [
        (node.gateway, &[][..], &KNOWN_FAILURES_WITHOUT_TLS[..]),
        (tls_gateway, &["--tls", "--insecure"][..], &[][..]),
    ];
    for (gateway, more, more_known) in runs {
        let known = KNOWN_FAILURES.iter().chain(more_known);
        let known: BTreeSet<String> = known.map(|(case, _reason)| (*case).to_owned()).collect();
        let cases = run_h2spec(folder.path(), gateway, more);
        assert_eq!(cases.len(), CASES, "{more:?}: {cases:#?}");
        let failed: BTreeSet<String> =
            cases.into_iter().filter(|(_, has_failed)| *has_failed).map(|(it, _)| it).collect();
        assert_eq!(failed, known, "{more:?}");
    }
}

#[test]
fn a_report_of_h2spec_is_read_case_by_case() {
    let report = "<testsuite name=\"3.5. Preface\" package=\"http2/3.5\">\n\
        <testcase package=\"http2/3.5\" classname=\"Sends &#34;PRI&#34;\" time=\"0.1\"></testcase>\n\
        <testcase package=\"http2/4.1\" classname=\"Sends a frame\" time=\"2\">\n\
        <error>Timeout</error>\n</testcase>\n</testsuite>";
    let wanted = [("http2/3.5: Sends \"PRI\"", false), ("http2/4.1: Sends a frame", true)];
    assert_eq!(parse_report(report), wanted.map(|(name, failed)| (name.to_owned(), failed)));
}
