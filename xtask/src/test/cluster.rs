//! Shell: the cluster tier: starts a Kubernetes cluster if there is none, and removes only what it has started.

use std::{ffi::OsStr, fs, panic::resume_unwind, path::Path, process::Command, thread};

use anyhow::{Context as _, Result, bail};

use super::{
    TestArgs, TierOutcome,
    build::{TestBuilder, TestProgram},
    conformance_results, root_test_command, run_and_count, run_and_count_lines, run_as_root,
    test_counts::TestCounts,
};
use crate::{
    chart::{CHECKS, HelmChart},
    cluster, image,
    setup::{self, SetupPurpose},
    sh,
};

/// Name of the cluster that all other tests share. The first test that needs Rouse installs it there.
const SHARED_CLUSTER: &str = "rouse-installed";
/// Name of the cluster of the [`SEPARATE_TESTS`], which run beside those of the shared one.
const SEPARATE_CLUSTER: &str = "rouse-separate";
/// Name of the cluster, an API server alone, that only the controller's own tests use.
const API_SERVER_CLUSTER: &str = "rouse-alone";
/// Test programs of the controller that need this API server.
pub(super) const API_SERVER_TESTS: [&str; 3] = ["apiserver", "platform", "webhook"];

/// Modules and tests that may run in parallel: they use namespaces or clusters of their own, and inject no faults into
/// the shared cluster.
const PARALLEL_TESTS: [&str; 22] = [
    "baseline::",
    "network_paths::",
    "runtime_contract::",
    "deletion::",
    "examples::",
    "gateway_api::",
    "ip_families::",
    "install::a_service_wakes",
    "kn::",
    "concurrency_limit::a_pod",
    "network_policies::",
    "other_ingresses::",
    "xtask_cluster::",
    "probes::",
    "third_party_manifests::",
    "sidecars::",
    "service_lifecycle::",
    "error_conditions::",
    "scaled_services::",
    "standby::actions::",
    "standby::applications::",
    "standby::wakes::",
];
/// Modules whose tests run one at a time on a cluster of their own. They take half of the time of all tests that run
/// alone, and mostly wait. A module of this name in another one, such as `standby::faults`, is meant as well.
/// One more cluster made a run longer: each takes a fifth of a processor, and the processors have no time left.
const SEPARATE_TESTS: [&str; 3] = ["faults::", "upgrade::", "pod_termination::"];
/// Module of the tests that run on any cluster.
const ANY_CLUSTER_MODULE: &str = "baseline";
/// Number of [`PARALLEL_TESTS`] that run at a time. They often wait for pods and time windows.
const PARALLELISM: u8 = 3;

/// Runs the tests against `--kubeconfig`, or against a cluster of xtask's.
pub(super) fn run(args: &TestArgs, builder: &TestBuilder) -> Result<TierOutcome> {
    let purposes =
        [SetupPurpose::Build, SetupPurpose::Kernel, SetupPurpose::Cluster, SetupPurpose::Test];
    setup::prepare(&purposes, args.yes)?;
    // A wrong chart fails the tier, but only after its other tests have run.
    let chart_outcome = check_chart(args, builder)
        .unwrap_or_else(|error| TierOutcome::CannotRun(format!("chart: {error:#}")));
    if let Some(file) = &args.kubeconfig {
        return Ok(chart_outcome.combine(run_on_existing_cluster(file, args, builder)?));
    }
    let xtask = std::env::current_exe()?;
    // Clusters of an earlier run that was killed would take this machine's memory.
    sh::run(cluster_command(&xtask, SHARED_CLUSTER).arg("sweep"))?;
    let rouse = builder.build_rouse()?;
    let (outcome, separate) = thread::scope(|scope| {
        // Named tests all run on the shared cluster.
        let separate = args
            .names
            .is_empty()
            .then(|| scope.spawn(|| run_separate_tests(&xtask, &rouse, args, builder)));
        let outcome = run_on_shared_cluster(&xtask, &rouse, args, builder);
        // A panic of the other thread goes on here, so that a broken test run is no success.
        let join = |it: thread::ScopedJoinHandle<'_, _>| {
            it.join().unwrap_or_else(|panic| resume_unwind(panic))
        };
        (outcome, separate.map(join))
    });
    // Both have ended by now, so that an error of one leaves no processes of the other behind.
    let mut outcome = chart_outcome.combine(outcome?);
    if let Some(separate) = separate {
        outcome = outcome.combine(separate?);
    }
    if let TierOutcome::Ran { skipped_note, counts, .. } = &mut outcome
        && counts.ignored > 0
    {
        let count = counts.ignored;
        skipped_note.push_str(&format!("; skipped {count} that take minutes (--long)"));
    }
    Ok(outcome)
}

/// Runs the controller's tests against an API server alone, and all but the [`SEPARATE_TESTS`] against the shared
/// cluster.
fn run_on_shared_cluster(
    xtask: &Path,
    rouse: &Path,
    args: &TestArgs,
    builder: &TestBuilder,
) -> Result<TierOutcome> {
    // Such a cluster is a developer's and stays: those of killed runs have been removed.
    let did_exist = cluster::exists(SHARED_CLUSTER)?;
    let mut up_command = nodes_up_command(xtask, SHARED_CLUSTER, args, rouse, did_exist);
    // The cluster with nodes starts meanwhile: both mostly wait.
    let (api_server_outcome, started) = thread::scope(|scope| {
        let starting = scope.spawn(|| sh::run(&mut up_command));
        let outcome = run_on_api_server(xtask, args, builder);
        (outcome, starting.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    let outcome = api_server_outcome.and_then(|api_server_outcome| {
        started?;
        Ok(api_server_outcome.combine(run_on_cluster(xtask, rouse, args, builder)?))
    });
    if !did_exist {
        sh::run(cluster_command(xtask, SHARED_CLUSTER).arg("down"))?;
    }
    outcome
}

/// Runs the [`SEPARATE_TESTS`] on their own cluster, and prints their output once all have ended.
fn run_separate_tests(
    xtask: &Path,
    rouse: &Path,
    args: &TestArgs,
    builder: &TestBuilder,
) -> Result<TierOutcome> {
    let variables = cluster_variables(SEPARATE_CLUSTER, xtask, rouse);
    let mut libtest_args = SEPARATE_TESTS.to_vec();
    libtest_args.extend(args.long.then_some("--include-ignored"));
    let mut command = root_test_command("cluster", args, builder, &variables, &libtest_args, 1)?;
    let did_exist = cluster::exists(SEPARATE_CLUSTER)?;
    let started = sh::run(&mut nodes_up_command(xtask, SEPARATE_CLUSTER, args, rouse, did_exist));
    let mut output = String::new();
    let outcome = started.and_then(|()| {
        run_and_count_lines(&mut command, |line| {
            output.push_str(line);
            output.push('\n');
        })
    });
    println!("\non the cluster {SEPARATE_CLUSTER}:\n{output}");
    // A cluster that a user started stays.
    if !did_exist {
        sh::run(cluster_command(xtask, SEPARATE_CLUSTER).arg("down"))?;
    }
    outcome
}

/// Environment variables of tests that run on the cluster `name`.
fn cluster_variables<'a>(
    name: &'a str,
    xtask: &'a Path,
    rouse: &'a Path,
) -> [(&'static str, &'a OsStr); 3] {
    [
        ("ROUSE_CLUSTER", OsStr::new(name)),
        ("ROUSE_XTASK", xtask.as_os_str()),
        // Clusters that tests start get the same image.
        (image::PROGRAM_VARIABLE, rouse.as_os_str()),
    ]
}

/// Checks the chart if Helm is available. Building Helm, as `cargo xtask chart` does, would double the build time.
fn check_chart(args: &TestArgs, builder: &TestBuilder) -> Result<TierOutcome> {
    let is_selected =
        |name: &str| args.names.is_empty() || args.names.iter().any(|it| name.contains(it));
    let checks: Vec<_> = CHECKS.into_iter().filter(|(name, _)| is_selected(name)).collect();
    if checks.is_empty() {
        return Ok(TierOutcome::empty());
    }
    // Counted as skipped, and not as passed: the chart was not checked.
    if !cluster::has_helm()? {
        let skipped_note = "; skipped chart:: (no helm: `cargo xtask chart` builds it)".into();
        let counts = TestCounts::default();
        return Ok(TierOutcome::Ran { counts, has_passed: true, skipped_note });
    }
    let chart = HelmChart::find(&builder.workspace, builder.build_rouse()?)?;
    let mut counts = TestCounts::default();
    for (name, check) in checks {
        match check(&chart) {
            Ok(()) => {
                println!("test {name} ... ok");
                counts.passed += 1;
            }
            Err(error) => {
                println!("test {name} ... FAILED: {error:#}");
                counts.failed += 1;
                counts.failures.push(vec![name.to_owned(), format!("{error:#}")]);
            }
        }
    }
    let has_passed = counts.failed == 0;
    Ok(TierOutcome::Ran { counts, has_passed, skipped_note: String::new() })
}

/// Runs the controller's tests against an API server without nodes, which is removed afterwards.
fn run_on_api_server(xtask: &Path, args: &TestArgs, builder: &TestBuilder) -> Result<TierOutcome> {
    let target_args: Vec<&str> =
        API_SERVER_TESTS.iter().flat_map(|name| ["--test", *name]).collect();
    let programs = builder.build_tests(&target_args)?;
    let mut up_command = up_command(xtask, API_SERVER_CLUSTER);
    up_command.args(["--nodes", "0"]).args(args.yes.then_some("--yes"));
    let outcome = sh::run(&mut up_command).and_then(|()| run_sequentially(xtask, args, &programs));
    // Removed after failures as well: the next run must start with an empty API server.
    sh::run(cluster_command(xtask, API_SERVER_CLUSTER).arg("down"))?;
    outcome
}

fn run_sequentially(
    xtask: &Path,
    args: &TestArgs,
    programs: &[TestProgram],
) -> Result<TierOutcome> {
    let kubeconfig = sh::capture(cluster_command(xtask, API_SERVER_CLUSTER).arg("kubeconfig"))?;
    let variable = format!("ROUSE_TEST_APISERVER={}", kubeconfig.trim());
    let mut outcome = TierOutcome::empty();
    for program in programs {
        println!("{}", program.source);
        let mut command = cluster_command(xtask, API_SERVER_CLUSTER);
        // In the cluster's namespace, because the API server calls the webhooks on its own loopback.
        command.args(["run", "--", "env", "-C", &program.folder, &variable, &program.executable]);
        command.args(&args.names).arg("--test-threads=1");
        outcome = outcome.combine(run_and_count(&mut command)?);
    }
    Ok(outcome)
}

/// Command that starts a cluster of this run, which the next run removes if this one is killed.
fn up_command(xtask: &Path, name: &str) -> Command {
    let mut command = cluster_command(xtask, name);
    command.args(["up", "--owner", &std::process::id().to_string()]);
    command
}

fn cluster_command(xtask: &Path, name: &str) -> Command {
    let mut command = Command::new(xtask);
    command.args(["cluster", "--name", name]);
    command
}

/// Command that starts a cluster of two nodes, with the program `rouse` in its image.
fn nodes_up_command(
    xtask: &Path,
    name: &str,
    args: &TestArgs,
    rouse: &Path,
    does_exist: bool,
) -> Command {
    let mut command = up_command(xtask, name);
    // Both images are built here as the user; tests that start clusters of their own find them built.
    command.args(["--image", "hello", "--image", "rouse"]);
    command.env(image::PROGRAM_VARIABLE, rouse);
    // Two nodes: several tests need a pod and a client on different nodes.
    if !does_exist {
        command.args(["--nodes", "2"]);
    }
    if args.yes {
        command.arg("--yes");
    }
    command
}

/// Runs the tests of the whole system against the cluster with nodes.
fn run_on_cluster(
    xtask: &Path,
    rouse: &Path,
    args: &TestArgs,
    builder: &TestBuilder,
) -> Result<TierOutcome> {
    let mut skipped_modules = Vec::new();
    if !cluster::has_kn()? {
        skipped_modules.push(("kn::", "no kn is on the PATH and none could be built"));
    }
    let helm = cluster::has_helm()?.then(cluster::helm).transpose()?;
    if helm.is_none() {
        skipped_modules.push(("helm_chart::", "no helm: `cargo xtask chart` builds it"));
    }
    let suite = cluster::find_gateway_conformance()?;
    if suite.is_none() {
        let reason = "not built: `cargo xtask conformance` builds and runs it";
        skipped_modules.push((conformance_results::TEST_MODULE, reason));
    }
    let mut variables = cluster_variables(SHARED_CLUSTER, xtask, rouse).to_vec();
    variables.extend(helm.as_deref().map(|it| ("ROUSE_HELM", it.as_os_str())));
    let variable = conformance_results::FOLDER_VARIABLE;
    variables.extend(suite.as_deref().map(|it| (variable, it.as_os_str())));
    // Without the kinds their tests fail, and all others run.
    let kinds = cluster::fetch_gateway_kinds();
    if let Err(error) = &kinds {
        println!("there are no kinds of the Gateway API: {error:#}");
    }
    variables.extend(kinds.iter().map(|it| ("ROUSE_GATEWAY_KINDS", it.as_os_str())));
    // Results of an earlier run would be printed as those of this one if the suite does not get so far.
    conformance_results::remove_results(&builder.workspace);
    let outcome = run_tests(args, builder, &variables, &skipped_modules)?;
    conformance_results::print_results(&builder.workspace);
    Ok(outcome)
}

/// Runs all tests except the modules in `skipped_modules`, each with its reason. Long tests run only on request.
fn run_tests(
    args: &TestArgs,
    builder: &TestBuilder,
    variables: &[(&str, &OsStr)],
    skipped_modules: &[(&str, &str)],
) -> Result<TierOutcome> {
    let mut libtest_args: Vec<&str> =
        skipped_modules.iter().flat_map(|(module, _)| ["--skip", module]).collect();
    // A test that is named is wanted, however long it takes.
    let include_ignored = args.long || !args.names.is_empty();
    libtest_args.extend(include_ignored.then_some("--include-ignored"));
    let mut outcome = if args.names.is_empty() {
        // Two runs: first the modules that may run in parallel, then all others one at a time.
        let parallel = [&libtest_args[..], &PARALLEL_TESTS].concat();
        let others = PARALLEL_TESTS.iter().chain(&SEPARATE_TESTS);
        let skip_others = others.flat_map(|module| ["--skip", module]);
        let sequential: Vec<&str> = libtest_args.iter().copied().chain(skip_others).collect();
        let outcome = run_as_root("cluster", args, builder, variables, &parallel, PARALLELISM)?;
        outcome.combine(run_as_root("cluster", args, builder, variables, &sequential, 1)?)
    } else {
        run_as_root("cluster", args, builder, variables, &libtest_args, 1)?
    };
    if let TierOutcome::Ran { skipped_note, .. } = &mut outcome {
        for (module, reason) in skipped_modules {
            skipped_note.push_str(&format!("; skipped {module} ({reason})"));
        }
    }
    Ok(outcome)
}

/// Runs the baseline against the user's cluster. All other tests need a cluster that xtask made.
fn run_on_existing_cluster(
    file: &Path,
    args: &TestArgs,
    builder: &TestBuilder,
) -> Result<TierOutcome> {
    if !file.is_file() {
        bail!("--kubeconfig names {}, which is not a file", file.display());
    }
    let file = file.canonicalize()?;
    let variables = [("ROUSE_KUBECONFIG", file.as_os_str())];
    let main_file = builder.workspace.root.join("tests/cluster/main.rs");
    let main = fs::read_to_string(&main_file)
        .with_context(|| format!("cannot read {}", main_file.display()))?;
    // They stop nodes and processes, which only xtask's own clusters allow.
    let modules = modules_for_xtask_clusters(&main);
    let skipped_modules: Vec<_> =
        modules.iter().map(|module| (module.as_str(), "xtask did not make this cluster")).collect();
    run_tests(args, builder, &variables, &skipped_modules)
}

/// Returns the modules whose tests need a cluster that xtask made, from the text of the tier's `main.rs`.
fn modules_for_xtask_clusters(main: &str) -> Vec<String> {
    let modules = main.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
    // Every module but one, so that a new one is never forgotten.
    modules
        .filter(|module| *module != ANY_CLUSTER_MODULE)
        .map(|module| format!("{module}::"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_baseline_runs_on_a_cluster_of_the_user() {
        let modules = modules_for_xtask_clusters(include_str!("../../../tests/cluster/main.rs"));
        for module in ["faults::", "kn::", "pod_binding::", "revision_gc::"] {
            assert!(modules.iter().any(|one| one == module), "{module} is not in {modules:?}");
        }
        let skips_baseline = |module: &String| "baseline::a_test".contains(module.as_str());
        assert!(!modules.iter().any(skips_baseline), "{modules:?}");
    }
}
