//! Upstream's conformance tests of the Gateway API, on a cluster of their own: exactly the known ones fail.
//!
//! `cargo xtask conformance` builds and runs them. `cargo xtask test` skips the module where they are not built.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tests::installed_cluster::RouseCluster;
use tests::test_cluster::{TestCluster, find_condition, required_variable, run_for_output};

use self::results::{SuiteOutcome, SuiteTest, format_tables, parse_results};
use crate::xtask_cluster::DedicatedCluster;

mod results;

/// Arguments that start the cluster.
const UP_ARGS: [&str; 4] = ["--nodes", "2", "--image", "rouse"];
/// Arguments of the installation. On a busy machine rollouts take minutes.
const INSTALL_ARGS: [&str; 7] =
    ["install", "--apply", "--wait", "--timeout", "900", "--gateway", "nodeport"];
/// Name of the GatewayClass that chooses Rouse.
const GATEWAY_CLASS: &str = "gateway-conformance";
/// Features that the profile GATEWAY-HTTP begins with, for a GatewayClass that names none.
const CORE_FEATURES: &str = "Gateway,HTTPRoute,ReferenceGrant";
/// Flags of the suite. The tests run one after the other, because all Gateways have the same address. On a busy machine
/// pods start slowly. The cluster goes with all objects.
const FLAGS: [&str; 10] = [
    "-test.v",
    "-test.timeout=60m",
    "-disable-parallel-tests",
    "-cleanup-base-resources=false",
    "-timeout-config-overrides=NamespacesMustBeReady:900",
    "-organization=rouse",
    "-project=rouse",
    "-url=https://rouse.dev",
    "-contact=https://rouse.dev",
    concat!("-version=", env!("CARGO_PKG_VERSION")),
];
/// Script that runs the suite in the cgroup of the cluster's clients, in each hierarchy. So it ends with the cluster.
const SCRIPT: &str = "for it in /sys/fs/cgroup/*/\"$0\"/clients /sys/fs/cgroup/\"$0\"/clients; do \
                      [ ! -d \"$it\" ] || echo $$ > \"$it/cgroup.procs\" || exit 1; done; exec \"$@\"";

/// Tests that fail, each with the reason why that is accepted.
const KNOWN_FAILURES: [(&str, &str); 2] = [
    (
        "HTTPRouteMultipleGateways",
        "all Gateways have the same address, so each of them serves the routes of the others too",
    ),
    (
        "HTTPRouteServiceTypes",
        "headless Services are not supported: they have no ClusterIP that an activator could connect to",
    ),
];

/// Loads the server of the suite's backends on all nodes, under the name of each image that its manifests use.
///
/// One of these is a name server, which only tests of UDPRoutes query. The suite merely waits until its pod runs.
fn load_images(dedicated: &DedicatedCluster, suite: &Path) {
    let listed = run_for_output(Command::new(suite.join("gateway-conformance")).arg("--images"));
    let listed = listed.expect("the suite knows its images");
    let server = require_text(&suite.join("echo-basic"));
    let mut args = vec!["import", server.as_str()];
    args.extend(listed.lines());
    dedicated.run_xtask(&args);
}

/// Installs the kinds of the Gateway API of the suite's version, from the standard channel.
fn install_kinds(cluster: &TestCluster, suite: &Path) {
    let file = require_text(&suite.join("crds.yaml"));
    // By the server: some kinds are larger than the annotation that kubectl otherwise stores them in.
    let apply = ["apply", "--server-side", "--filename", &file];
    cluster.kubectl(&apply).expect("the API server takes the kinds");
    let wait = ["wait", "--for", "condition=Established", "--timeout", "300s", "crd", "--all"];
    cluster.kubectl(&wait).expect("the kinds are established");
}

/// Creates a GatewayClass, waits until it is accepted, and returns the features that its status names.
fn create_class(cluster: &TestCluster) -> Vec<String> {
    let manifest = format!(
        "apiVersion: gateway.networking.k8s.io/v1
kind: GatewayClass
metadata: {{name: {GATEWAY_CLASS}}}
spec: {{controllerName: rouse.dev/gateway}}
"
    );
    cluster.apply(&manifest).expect("the API server has the kind");
    let class = cluster.wait("the GatewayClass to be accepted", || {
        let class = cluster.get(&["gatewayclass", GATEWAY_CLASS]);
        (find_condition(&class, "Accepted")["status"] == "True").then_some(class)
    });
    let features = class["status"]["supportedFeatures"].as_array().into_iter().flatten();
    features.filter_map(|it| it["name"].as_str().map(str::to_owned)).collect()
}

/// Flags that choose the tests: those of the features that the status of the GatewayClass names, which the suite reads
/// itself. `single_test` is the only test to run.
fn build_selection_flags(features: &[String], single_test: Option<&str>) -> Vec<String> {
    let has_grpc = features.iter().any(|it| it == "GRPCRoute");
    let profiles = if has_grpc { "GATEWAY-HTTP,GATEWAY-GRPC" } else { "GATEWAY-HTTP" };
    let mut flags = vec![format!("-conformance-profiles={profiles}")];
    if features.is_empty() {
        flags.push(format!("-supported-features={CORE_FEATURES}"));
    }
    flags.extend(single_test.map(|it| format!("-run-test={it}")));
    flags
}

/// Files in the target directory that a run leaves for developers.
struct RunFiles {
    /// Tables of the results, which xtask prints.
    tables: PathBuf,
    /// Output of the suite.
    log: PathBuf,
}

impl RunFiles {
    fn new() -> Self {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("a folder in target/");
        let file = |extension: &str| target.join(format!("gateway-conformance.{extension}"));
        Self { tables: file("md"), log: file("log") }
    }
}

/// Runs the suite in the control plane's network namespace, from which a node's kube-proxy leads to the ClusterIP that
/// Gateways have as their address. Returns the results, and upstream's report of them.
fn run_suite(
    (cluster_name, cluster): (&str, &TestCluster),
    suite: &Path,
    flags: &[String],
    log: &Path,
) -> (Vec<SuiteTest>, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let (results, report) = (folder.path().join("results.json"), folder.path().join("report.yaml"));
    let (cgroup, program) =
        (format!("rouse-cluster-{cluster_name}"), require_text(&suite.join("gateway-conformance")));
    let words = ["sh", "-c", SCRIPT, &cgroup, &program];
    let mut command = cluster.command(&words).expect("a cluster of xtask's");
    command.args(FLAGS).args(flags).arg(format!("-gateway-class={GATEWAY_CLASS}"));
    command.arg(format!("-results={}", results.display()));
    command.arg(format!("-report-output={}", report.display()));
    let output = File::create(log).expect("target/ can be written");
    let errors = output.try_clone().expect("a second descriptor");
    let status = command.stdin(Stdio::null()).stdout(output).stderr(errors).status();
    // It ends with an error if a test has failed, and has written all results in any way.
    let status = status.expect("xtask is there");
    let text = fs::read_to_string(&results).unwrap_or_else(|error| {
        panic!("no results ({error}): the suite ended with {status}, see {}", log.display())
    });
    (parse_results(&text), fs::read_to_string(&report).unwrap_or_default())
}

fn require_text(path: &Path) -> String {
    path.to_str().expect("a path of text").to_owned()
}

#[test]
#[ignore = "takes minutes: --long"]
fn only_known_conformance_tests_of_the_gateway_api_fail() {
    let suite = PathBuf::from(required_variable("ROUSE_GATEWAY_CONFORMANCE"));
    let single_test = std::env::var("ROUSE_CONFORMANCE_TEST").ok();
    let dedicated = DedicatedCluster::start_with("conformance", &UP_ARGS);
    let cluster = TestCluster::by_name(&dedicated.name);
    load_images(&dedicated, &suite);
    // Before Rouse, which looks for missing kinds only once a minute.
    install_kinds(&cluster, &suite);
    let rouse = RouseCluster::on_own_cluster(cluster, &INSTALL_ARGS);
    let features = create_class(&rouse.cluster);
    let files = RunFiles::new();
    let flags = build_selection_flags(&features, single_test.as_deref());
    let place = (dedicated.name.as_str(), &rouse.cluster);
    let (tests, report) = run_suite(place, &suite, &flags, &files.log);
    let tables = format_tables(&tests, &KNOWN_FAILURES) + "\nUpstream's report:\n\n" + &report;
    fs::write(&files.tables, tables).expect("target/ can be written");

    let names = |is_wanted: fn(&SuiteTest) -> bool| -> BTreeSet<&str> {
        tests.iter().filter(|it| is_wanted(it)).map(|it| it.name.as_str()).collect()
    };
    let (all, skipped) = (names(|_| true), names(|it| it.outcome == SuiteOutcome::Skipped));
    let known: BTreeSet<&str> = KNOWN_FAILURES.into_iter().map(|(name, _)| name).collect();
    assert!(known.is_subset(&all), "upstream has no test of a known name: {known:?}, {all:?}");
    assert!(!names(|it| it.outcome == SuiteOutcome::Passed).is_empty(), "no test has passed");
    let expected: BTreeSet<&str> = known.difference(&skipped).copied().collect();
    let failed = names(|it| it.outcome == SuiteOutcome::Failed);
    assert_eq!(failed, expected, "see {} and {}", files.log.display(), files.tables.display());
}

#[test]
fn the_documents_list_the_known_failures() {
    let page = include_str!("../../docs/gateway-api.md");
    let table = page.split_once("| test that fails | reason |\n|---|---|\n");
    let (_, behind) = table.expect("the page has the table");
    let listed: Vec<&str> = behind.lines().take_while(|line| line.starts_with('|')).collect();
    let expected = KNOWN_FAILURES.map(|(name, reason)| format!("| `{name}` | {reason} |"));
    assert_eq!(listed, expected);
}

#[test]
fn the_suite_runs_the_tests_of_the_features_that_the_class_names() {
    let features =
        |names: &[&str]| -> Vec<String> { names.iter().map(|name| (*name).to_owned()).collect() };
    let (http, both) =
        ("-conformance-profiles=GATEWAY-HTTP", "-conformance-profiles=GATEWAY-HTTP,GATEWAY-GRPC");
    let core = "-supported-features=Gateway,HTTPRoute,ReferenceGrant";
    assert_eq!(build_selection_flags(&[], None), [http, core]);
    assert_eq!(build_selection_flags(&features(&["Gateway"]), None), [http]);
    let named = features(&["Gateway", "GRPCRoute"]);
    assert_eq!(
        build_selection_flags(&named, Some("GRPCRouteWeight")),
        [both, "-run-test=GRPCRouteWeight"]
    );
}
