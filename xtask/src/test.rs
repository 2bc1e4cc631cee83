//! Shell: builds and runs the tests, tier by tier.

mod build;
mod cluster;
mod conformance_results;
mod image_prebuild;
mod lane_cgroup;
mod results;
mod source_tier;
mod test_counts;
mod tier_lane;
mod unprivileged;

use std::{
    convert::Infallible,
    ffi::OsStr,
    fs,
    num::NonZeroU32,
    path::{Path, PathBuf},
    process::Command,
    sync::mpsc::{self, Receiver},
    time::Instant,
};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

pub(crate) use self::test_counts::TestCounts;
use self::{
    build::TestBuilder,
    image_prebuild::ImagePrebuild,
    lane_cgroup::SourceLane,
    results::{TierOutcome, TierRow, print_results},
    tier_lane::{RunningLane, TierLane},
};
use crate::{
    build_ebpf, image, servers,
    setup::{self, SetupPurpose},
    sh,
    workspace::CargoWorkspace,
};

/// Arguments of the command `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub(crate) struct TestArgs {
    /// Tiers to run, separated by commas; all tiers when none is named
    #[arg(long, value_delimiter = ',', value_name = "TIER,…")]
    tier: Vec<TestTier>,
    /// Install packages that the tests need without asking
    #[arg(long)]
    yes: bool,
    /// Run also the tests of the cluster tier that take minutes each, and those of the shell tier that need large
    /// packages, as named tests always do. In the shell tier, test the hard limit with a million requests, and bodies
    /// of 10 GiB
    #[arg(long)]
    long: bool,
    /// Only build the test program of the tier kernel or local, and copy it to FILE
    #[arg(long, value_name = "FILE")]
    build_only: Option<PathBuf>,
    /// Test the cluster of the kubeconfig FILE instead of one that xtask makes
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Run the tests N times, and stop at the first failure: to reproduce a rare one
    #[arg(long, value_name = "N", default_value_t = NonZeroU32::MIN, requires = "names")]
    repeat: NonZeroU32,
    /// Run the root tiers' programs that FILE lists, and build none
    #[arg(long, value_name = "FILE", hide = true)]
    built: Option<PathBuf>,
    /// Run only tests whose name contains one of these; they may stand behind `--`
    #[arg(value_name = "NAME")]
    names: Vec<String>,
}

impl TestArgs {
    /// Arguments that run upstream's conformance tests of the Gateway API. With `yes`, missing packages are installed
    /// without a question.
    pub(crate) fn of_conformance_tests(yes: bool) -> Self {
        Self {
            tier: vec![TestTier::Cluster],
            yes,
            long: false,
            build_only: None,
            kubeconfig: None,
            repeat: NonZeroU32::MIN,
            built: None,
            names: vec![conformance_results::TEST_MODULE.to_owned()],
        }
    }
}

/// A kind of test, ordered by its requirements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum TestTier {
    /// Decisions and formulas, without effects outside the process
    Pure,
    /// Sockets on loopback, and files
    Shell,
    /// Real programs in the running kernel, in namespaces; root
    Kernel,
    /// The local node as a whole; root
    Local,
    /// A real Kubernetes; root
    Cluster,
}

impl TestTier {
    const ALL: [Self; 5] = [Self::Pure, Self::Shell, Self::Kernel, Self::Local, Self::Cluster];

    fn name(self) -> &'static str {
        match self {
            Self::Pure => "pure",
            Self::Shell => "shell",
            Self::Kernel => "kernel",
            Self::Local => "local",
            Self::Cluster => "cluster",
        }
    }

    /// Test programs that run as root, among them one of `rouse`, whose build also builds that program.
    fn test_programs(self) -> Vec<&'static str> {
        match self {
            Self::Pure | Self::Shell => Vec::new(),
            Self::Kernel => vec!["kernel", "cli"],
            Self::Local => vec!["local", "cli"],
            Self::Cluster => [&cluster::API_SERVER_TESTS[..], &["cluster", "cli"]].concat(),
        }
    }
}

/// Runs `cargo xtask test`: runs the tiers, some of them in parallel, and prints the table of results.
pub(crate) fn run(args: &TestArgs) -> Result<()> {
    let workspace = CargoWorkspace::load()?;
    if let Some(file) = &args.build_only {
        return build_only(&args.tier, file, workspace);
    }
    let requested = if args.tier.is_empty() { TestTier::ALL.to_vec() } else { args.tier.clone() };
    // In the order of their requirements: a wrong formula shows before a cluster is built.
    let tiers: Vec<_> = TestTier::ALL.into_iter().filter(|tier| requested.contains(tier)).collect();
    // A tier with programs that are already built is the lane of another process.
    if let (Some(_), [lane]) = (&args.built, tiers.as_slice())
        && let Err(error) = lane_cgroup::enter(Some(*lane))
    {
        println!("{error:#}");
    }
    let lanes = plan_lanes(&tiers);
    // With a single tier, the tier itself prepares what it needs.
    if !lanes.is_empty() {
        // Once, before the tiers: it may ask here, and package installations at the same time would block each other.
        let purposes = SetupPurpose::TESTS.into_iter();
        let purposes = purposes.chain(args.long.then_some(SetupPurpose::LongTest));
        if let Err(error) = setup::prepare(&purposes.collect::<Vec<_>>(), args.yes) {
            // Tiers that need the packages fail and report it; the others run.
            println!("{error:#}");
        }
    }
    let builder = create_builder(&tiers, args, workspace)?;
    let prebuild = should_prebuild_images(&tiers, args)
        .then(|| ImagePrebuild::start(&builder.workspace))
        .transpose()?;
    let (mut running_lanes, mut rows) = (Vec::new(), Vec::new());
    let (running, others) = mpsc::channel();
    let mut others = Some(others);
    for &tier in &lanes {
        let is_last = tier == TestTier::Cluster;
        let others = if is_last { others.take() } else { None };
        match start_lane(tier, others, (!is_last).then(|| running.clone()), args, &builder) {
            Ok(lane) => running_lanes.push(lane),
            // An error here would leave the lanes that run already, with their clusters, behind this process.
            Err(error) => rows.push(TierRow::cannot_run(tier, &error)),
        }
    }
    drop(running);
    // Not earlier: the lanes wait for the builds until here.
    let source_lane = (!running_lanes.is_empty()).then(SourceLane::enter).transpose();
    let _source_lane = source_lane.unwrap_or_else(|error| {
        println!("{error:#}");
        None
    });
    for tier in tiers.into_iter().filter(|tier| !lanes.contains(tier)) {
        println!("\n== {} ==", tier.name());
        let started = Instant::now();
        let outcome = run_repeatedly(tier, args, &builder)
            .unwrap_or_else(|error| TierOutcome::CannotRun(format!("{error:#}")));
        rows.push(TierRow { tier, outcome, seconds: started.elapsed().as_secs_f64() });
    }
    rows.extend(running_lanes.into_iter().map(TierLane::finish));
    prebuild.map(ImagePrebuild::finish).transpose()?;
    rows.sort_by_key(|row| row.tier);
    print_results(&rows)
}

/// Returns the tiers that run in processes of their own, beside the others, in the order in which they begin.
fn plan_lanes(tiers: &[TestTier]) -> Vec<TestTier> {
    if tiers.len() == 1 || !tiers.contains(&TestTier::Cluster) {
        return Vec::new();
    }
    // The tiers kernel and local run beside the builds. Their tests run one at a time, and mostly wait. Beside two
    // clusters such a test takes ten times as long, and tests with timeouts fail. So the clusters start once both have
    // ended. The builds end earlier; the tests without root that are left mostly wait, as clusters do while they start.
    let lanes = [TestTier::Kernel, TestTier::Local, TestTier::Cluster];
    lanes.into_iter().filter(|tier| tiers.contains(tier)).collect()
}

/// Returns true if images should be built ahead: the cluster tier is one of several, and runs all tests on a new
/// cluster.
fn should_prebuild_images(tiers: &[TestTier], args: &TestArgs) -> bool {
    tiers.len() > 1
        && tiers.contains(&TestTier::Cluster)
        && args.kubeconfig.is_none()
        && args.names.is_empty()
}

/// Starts a tier in a process of its own. This process builds its programs first. Processes of Cargo wait for each
/// other, so a build in the other process would wait for all later builds here.
///
/// The tier starts once the lanes `others` have ended, and drops `running` at its end.
fn start_lane(
    tier: TestTier,
    others: Option<Receiver<Infallible>>,
    running: Option<RunningLane>,
    args: &TestArgs,
    builder: &TestBuilder,
) -> Result<TierLane> {
    let programs = tier.test_programs().into_iter();
    let target_args: Vec<&str> = programs.flat_map(|program| ["--test", program]).collect();
    let built = builder.build_tests(&target_args)?;
    TierLane::start(tier, others, running, args, &builder.workspace, &built)
}

/// Creates the builder of the test programs of all tiers.
fn create_builder(
    tiers: &[TestTier],
    args: &TestArgs,
    workspace: CargoWorkspace,
) -> Result<TestBuilder> {
    // These tiers run without root, on machines that may lack the toolchain for eBPF.
    if tiers.iter().all(|tier| matches!(tier, TestTier::Pure | TestTier::Shell)) {
        return Ok(TestBuilder::without_ebpf(workspace));
    }
    let prepared = setup::prepare(&[SetupPurpose::Build, SetupPurpose::Kernel], args.yes);
    let builder = TestBuilder::with_ebpf(workspace, prepared);
    match &args.built {
        Some(file) => builder.with_prebuilt(file),
        None => Ok(builder),
    }
}

/// Runs a tier `--repeat` times, or until it fails.
fn run_repeatedly(tier: TestTier, args: &TestArgs, builder: &TestBuilder) -> Result<TierOutcome> {
    let mut outcome = run_tier(tier, args, builder)?;
    for round in 2..=args.repeat.get() {
        // A further round without tests has no purpose, and the user wants to see the first failure.
        if !outcome.is_success() || outcome.test_count() == 0 {
            break;
        }
        println!("-- round {round} of {} --", args.repeat);
        outcome = outcome.combine(run_tier(tier, args, builder)?);
    }
    Ok(outcome)
}

/// Runs the tests of one tier.
fn run_tier(tier: TestTier, args: &TestArgs, builder: &TestBuilder) -> Result<TierOutcome> {
    let workspace = &builder.workspace;
    match tier {
        TestTier::Pure => unprivileged::run(tier, args, builder),
        TestTier::Shell => {
            // Pods of some of its tests are servers in other languages.
            setup::prepare(&[SetupPurpose::Test], args.yes)?;
            unprivileged::run(tier, args, builder)
        }
        TestTier::Kernel => {
            setup::prepare(
                &[SetupPurpose::Build, SetupPurpose::Kernel, SetupPurpose::Test],
                args.yes,
            )?;
            // Built as the user: root's caches would have to be filled first.
            let servers = servers::build(workspace)?;
            servers::remove_results(workspace);
            let variables = [("ROUSE_SERVERS", servers.as_os_str())];
            let outcome = run_as_root("kernel", args, builder, &variables, &[], 1)?;
            servers::print_results(workspace);
            Ok(outcome)
        }
        TestTier::Local => {
            setup::prepare(
                &[SetupPurpose::Build, SetupPurpose::Node, SetupPurpose::Test],
                args.yes,
            )?;
            image::write_layouts(workspace, &["hello"], &workspace.target.join("images"))?;
            // Some of its clients of TLS are in Go.
            let servers = servers::build(workspace)?;
            let variables = [("ROUSE_SERVERS", servers.as_os_str())];
            run_as_root("local", args, builder, &variables, &[], 1)
        }
        TestTier::Cluster => cluster::run(args, builder),
    }
}

/// Builds one target of the package `tests` as the user, and runs it as root, with `parallelism` tests at a time.
fn run_as_root(
    target: &str,
    args: &TestArgs,
    builder: &TestBuilder,
    extra_variables: &[(&str, &OsStr)],
    libtest_args: &[&str],
    parallelism: u8,
) -> Result<TierOutcome> {
    let mut command =
        root_test_command(target, args, builder, extra_variables, libtest_args, parallelism)?;
    run_and_count(&mut command)
}

/// Returns the command that runs the test program `target` as root, `parallelism` tests at a time.
fn root_test_command(
    target: &str,
    args: &TestArgs,
    builder: &TestBuilder,
    extra_variables: &[(&str, &OsStr)],
    libtest_args: &[&str],
    parallelism: u8,
) -> Result<Command> {
    let (workspace, object) = (&builder.workspace, builder.object()?);
    let (executable, rouse) = (builder.build_target(target)?, builder.build_rouse()?);
    let images = workspace.target.join("images");
    let mut variables = vec![
        ("ROUSE_BIN", rouse.as_os_str()),
        ("ROUSE_IMAGES", images.as_os_str()),
        (build_ebpf::OBJECT_VARIABLE, object.as_os_str()),
    ];
    variables.extend(extra_variables);
    let mut command = sh::root_command_with(&executable, &variables);
    // Usually one test at a time: tests share the machine's processors, and some compare counts under load.
    command
        .args(&args.names)
        .args(libtest_args)
        .arg(format!("--test-threads={parallelism}"))
        .current_dir(workspace.root.join("tests"));
    Ok(command)
}

/// Builds the test program of the kernel tier, with the eBPF programs embedded.
pub(crate) fn build_kernel_tier() -> Result<PathBuf> {
    let builder = TestBuilder::with_ebpf(CargoWorkspace::load()?, Ok(()));
    builder.object()?;
    builder.build_target(TestTier::Kernel.name()).map(PathBuf::from)
}

/// Names of the tests of a built program.
#[derive(Debug)]
struct ListedTests {
    /// Tests that are not ignored.
    usual: Vec<String>,
    /// Ignored tests that run with `--long`.
    long: Vec<String>,
}

/// Names of the tests of a built program, without the ignored ones.
pub(crate) fn test_names(program: &Path) -> Result<Vec<String>> {
    Ok(list_tests(program)?.usual)
}

/// Lists the tests of a built program, except the ignored ones that other tests run as their subprocesses.
fn list_tests(program: &Path) -> Result<ListedTests> {
    let list = |extra_args: &[&str]| -> Result<Vec<String>> {
        let mut command = Command::new(program);
        let listed = sh::capture(command.args(["--list", "--format", "terse"]).args(extra_args))?;
        let names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
        Ok(names.map(str::to_owned).collect())
    };
    // libtest lists ignored tests among all, so they are subtracted.
    let mut ignored = list(&["--ignored"])?;
    let mut usual = list(&[])?;
    usual.retain(|name| !ignored.contains(name));
    ignored.retain(|name| is_in_long_module(name));
    Ok(ListedTests { usual, long: ignored })
}

/// Returns true if a test is in a module `long`: lists of ignored tests have no reasons that would tell it.
fn is_in_long_module(name: &str) -> bool {
    name.rsplit("::").skip(1).any(|module| module == "long")
}

/// Copies the test program of one root tier to `file`, to run it on another machine.
fn build_only(tiers: &[TestTier], file: &Path, workspace: CargoWorkspace) -> Result<()> {
    let [tier @ (TestTier::Kernel | TestTier::Local)] = tiers else {
        bail!("--build-only needs `--tier kernel` or `--tier local`");
    };
    let builder = TestBuilder::with_ebpf(workspace, Ok(()));
    builder.object()?;
    let program = builder.build_target(tier.name())?;
    fs::copy(&program, file)
        .with_context(|| format!("cannot copy {program} to {}", file.display()))?;
    println!("test: {} holds the {} tier", file.display(), tier.name());
    Ok(())
}

/// Runs a test program, prints its output, and counts results.
fn run_and_count(command: &mut Command) -> Result<TierOutcome> {
    run_and_count_lines(command, |line| println!("{line}"))
}

/// Runs a test program, passes each line of its output to `print`, and counts its results.
fn run_and_count_lines(command: &mut Command, mut print: impl FnMut(&str)) -> Result<TierOutcome> {
    // Parallel tests report in the order of their ends, so the time between two lines is not the time of a test.
    let is_sequential = command.get_args().any(|it| it == "--test-threads=1");
    let mut counts = TestCounts::default();
    let mut last_line_at = Instant::now();
    let has_passed = sh::run_with_lines(command, |line| {
        print(line);
        counts.parse_line(line);
        if is_sequential {
            counts.record_seconds(line, last_line_at.elapsed().as_secs_f64());
            last_line_at = Instant::now();
        }
    })?;
    Ok(TierOutcome::Ran { counts, has_passed, skipped_note: String::new() })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct TestLine {
        #[command(flatten)]
        args: TestArgs,
    }

    #[test]
    fn a_module_tells_the_tests_that_run_with_long() {
        for name in ["long::chromium_opens_a_page", "browsers::long::pages::one_opens"] {
            assert!(is_in_long_module(name), "{name}");
        }
        for name in ["long", "attacks::long", "longest::a_test", "an_activator_of_its_own"] {
            assert!(!is_in_long_module(name), "{name}");
        }
    }

    #[test]
    fn names_of_tests_may_stand_behind_two_dashes() {
        for words in [&["--repeat", "3", "a", "b"][..], &["--repeat", "3", "--", "a", "b"]] {
            let words = ["test", "--tier", "pure,shell"].iter().chain(words);
            let TestLine { args } = TestLine::try_parse_from(words).expect("valid words");
            assert_eq!((args.repeat.get(), args.names), (3, vec!["a".to_owned(), "b".to_owned()]));
            assert_eq!(args.tier, [TestTier::Pure, TestTier::Shell]);
        }
        assert!(TestLine::try_parse_from(["test", "--repeat", "3"]).is_err(), "all tests");
    }
}
