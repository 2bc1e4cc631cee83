//! Shell: loads the eBPF programs into each supported kernel, and runs the kernel tier there, in virtual machines.

mod cpio;
mod debian;
mod initramfs;
mod job_output;
mod modules;
mod packages;
mod report;
mod supported;
mod vm;

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use self::{
    debian::DebianMirrors,
    initramfs::shell_quote,
    job_output::JobResults,
    report::{KernelOutcome, KernelRunOutput, KernelTables, LOAD_RUN, TESTS_RUN},
    supported::{KERNELS, SupportedKernel, TestSelection},
    vm::{VirtualMachine, VmAccelerator},
};
use crate::{
    servers,
    setup::{self, SetupPurpose},
    test,
    workspace::CargoWorkspace,
};

/// Kernels to run, and the tests to run on them.
#[derive(Debug, clap::Args)]
pub(crate) struct KernelsArgs {
    /// Kernels to run, separated by commas; all supported ones when none is named: 5.10, 6.1, 6.12, newest
    #[arg(long, value_delimiter = ',', value_name = "KERNEL,…", value_parser = supported::find_kernel)]
    kernel: Vec<&'static SupportedKernel>,
    /// Only load the programs and print the number of instructions that the verifier walks in each
    #[arg(long)]
    only_load: bool,
    /// Load the programs of the object FILE instead of building one
    #[arg(long, value_name = "FILE", requires = "only_load")]
    object: Option<PathBuf>,
    /// Run the test program FILE, from `test --tier kernel --build-only FILE`, instead of building one
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Accelerator of the virtual machines [default: kvm where it works, else tcg]
    #[arg(long)]
    accel: Option<VmAccelerator>,
    /// Take packages from this Debian mirror instead of those in apt's sources
    #[arg(long, value_name = "URI")]
    mirror: Option<String>,
    /// Install what is missing without asking
    #[arg(long)]
    yes: bool,
    /// Write the results to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Run only tests whose name contains one of these, beside the verifier's tests
    #[arg(last = true, value_name = "NAME", conflicts_with = "only_load")]
    names: Vec<String>,
}

/// Prefix of the names of the verifier's tests, which always run.
const VERIFIER_TESTS: &str = "verifier::";
/// Environment variable with the object's path, for the verifier's tests.
const OBJECT_VARIABLE: &str = "ROUSE_VERIFY_OBJECT";
/// Prefix of the names of the tests that need servers, whose directory is in the variable [`SERVERS_VARIABLE`].
const SERVER_TESTS: &str = "servers::";
const SERVERS_VARIABLE: &str = "ROUSE_SERVERS";
/// Timeouts of a machine: to load all programs, and for all tests. With emulation, minutes and an hour are usual.
const LOAD_TIMEOUT: Duration = Duration::from_secs(20 * 60);
const TESTS_TIMEOUT: Duration = Duration::from_secs(2 * 60 * 60);

/// Runs `cargo xtask kernels`: all chosen kernels, one after the other.
pub(crate) fn run(args: &KernelsArgs) -> Result<()> {
    report_outcomes(&run_kernels(args)?, args.json.as_deref())
}

/// Builds the tests and their servers, and returns the outcome of each chosen kernel.
fn run_kernels(args: &KernelsArgs) -> Result<Vec<KernelOutcome>> {
    if env::consts::ARCH != "x86_64" {
        bail!("the virtual machines are x86-64's, and this machine's programs are not");
    }
    let purposes = [SetupPurpose::Build, SetupPurpose::Kernels, SetupPurpose::Test];
    // The machines mount this machine's files, so the servers and tools of the tests are installed here. Loading
    // alone needs none of them.
    setup::prepare(if args.only_load { &purposes[..2] } else { &purposes }, args.yes)?;
    let workspace = CargoWorkspace::load()?;
    let folder = workspace.target.join("kernels");
    let tests = workspace.root.join("tests");
    let program = match &args.program {
        Some(program) => program.clone(),
        None => test::build_kernel_tier()?,
    };
    let names = find_test_names(args, &program)?;
    let with_servers = names.iter().any(|name| name.starts_with(SERVER_TESTS));
    let servers = with_servers.then(|| servers::build(&workspace)).transpose()?;
    let runner = KernelRunner {
        args,
        names,
        program,
        tests,
        servers,
        folder,
        accel: args.accel.unwrap_or_else(VmAccelerator::find),
        mirrors: DebianMirrors::find(args.mirror.as_deref())?,
    };
    let kernels =
        if args.kernel.is_empty() { KERNELS.iter().collect() } else { args.kernel.clone() };
    let run_on_kernel = |kernel: &'static SupportedKernel| {
        // A kernel that cannot run is a result of its own, so that the others still run.
        let outcome = runner.run_on(kernel);
        outcome.unwrap_or_else(|error| KernelOutcome::not_run(kernel.name, format!("{error:#}")))
    };
    Ok(kernels.into_iter().map(run_on_kernel).collect())
}

/// Names of the tests to run on kernels that support them, without the verifier's.
fn find_test_names(args: &KernelsArgs, program: &Path) -> Result<Vec<String>> {
    let mut names = test::test_names(program)?;
    supported::check_table(&names).map_err(anyhow::Error::msg)?;
    let is_selected =
        |test: &str| args.names.is_empty() || args.names.iter().any(|name| test.contains(name));
    names.retain(|test| !args.only_load && !test.starts_with(VERIFIER_TESTS) && is_selected(test));
    if names.is_empty() && !args.only_load {
        bail!("no test has a name that contains one of: {}", args.names.join(", "));
    }
    Ok(names)
}

/// Settings that all kernels of a run share.
struct KernelRunner<'a> {
    args: &'a KernelsArgs,
    /// Path of the test program; `names` has the tests to run beside the verifier's.
    program: PathBuf,
    names: Vec<String>,
    /// Directory in which the tests run.
    tests: PathBuf,
    /// Directory of the servers that tests start; `None` if no chosen test needs them.
    servers: Option<PathBuf>,
    /// Directory for initramfs images and console logs.
    folder: PathBuf,
    accel: VmAccelerator,
    mirrors: DebianMirrors,
}

impl KernelRunner<'_> {
    /// Boots one kernel, runs the tests that it supports, and returns what its console has reported.
    fn run_on(&self, kernel: &'static SupportedKernel) -> Result<KernelOutcome> {
        println!("\n== Linux {} ==", kernel.name);
        let fetched = debian::fetch(kernel, &self.mirrors)?;
        let series = supported::parse_series(&fetched.release)
            .with_context(|| format!("Linux {} has no number", fetched.release))?;
        // The downloaded kernel decides, because the name `newest` has no fixed series.
        let TestSelection { supported: run, unsupported: skipped_tests } =
            supported::select_tests(&self.names, series);
        let job = self.job_script(&run)?;
        fs::create_dir_all(&self.folder)
            .with_context(|| format!("cannot make {}", self.folder.display()))?;
        let file = |run_name: &str| self.folder.join(format!("{}.{run_name}", kernel.name));
        let initramfs = file("initramfs");
        fs::write(&initramfs, initramfs::build(&fetched, &self.program, &job)?)
            .with_context(|| format!("cannot write {}", initramfs.display()))?;
        let machine = VirtualMachine {
            kernel: &fetched.image,
            initramfs: &initramfs,
            console: file("console"),
            accel: self.accel,
            timeout: if self.args.only_load { LOAD_TIMEOUT } else { TESTS_TIMEOUT },
        };
        println!("Linux {} by {}: {} tests to run", fetched.release, self.accel.name(), run.len());
        let (started, mut results) = (Instant::now(), JobResults::default());
        machine.run(|line| {
            println!("{:>6} | {}", kernel.name, line.trim_end());
            // Read from the console: a machine that hangs still leaves the results before.
            results.parse_line(line);
        })?;
        let run_output = KernelRunOutput {
            version: &fetched.version,
            results,
            requested_tests: run.len(),
            skipped_tests,
            console_tail: machine.console_tail()?,
            seconds: started.elapsed().as_secs(),
        };
        Ok(KernelOutcome::from_run(kernel.name, run_output))
    }

    /// Shell script with the machine's work, which the init script runs.
    fn job_script(&self, run: &[String]) -> Result<String> {
        let mut job =
            "export HOME=/root TERM=dumb RUST_BACKTRACE=0 PATH=/usr/local/sbin:/usr/local/bin:\
                       /usr/sbin:/usr/bin:/sbin:/bin\nulimit -n 65536\nip link set lo up\n"
                .to_owned();
        // Raw mode: the terminal layer would add a carriage return to each line.
        job += "exec >/dev/ttyS1 2>&1 </dev/null\nbusybox stty -F /dev/ttyS1 raw\n";
        job += &format!("cd {}\n", shell_quote(&self.tests.to_string_lossy()));
        let files = [(OBJECT_VARIABLE, &self.args.object), (SERVERS_VARIABLE, &self.servers)];
        for (name, file) in
            files.into_iter().filter_map(|(name, file)| Some((name, file.as_ref()?)))
        {
            let file = fs::canonicalize(file)
                .with_context(|| format!("cannot find {}", file.display()))?;
            job += &format!("export {name}={}\n", shell_quote(&file.to_string_lossy()));
        }
        job += &marked_run_lines(LOAD_RUN, &format!("--nocapture {VERIFIER_TESTS}"), "");
        if !run.is_empty() {
            let names: Vec<String> = run.iter().map(|name| shell_quote(name)).collect();
            // Logs of the agents would hide the results, and are needed only after a failure.
            job += &marked_run_lines(
                TESTS_RUN,
                &format!("--exact {}", names.join(" ")),
                "2>/run/rouse/agents",
            );
            job += "[ $code = 0 ] || tail -c 50000 /run/rouse/agents\n";
        }
        Ok(job + "exec busybox poweroff -f\n")
    }
}

/// Script lines that run the test program with `test_args` and an optional shell `redirection`, between lines that mark
/// begin and end in the output.
fn marked_run_lines(run: &str, test_args: &str, redirection: &str) -> String {
    format!(
        "echo 'rouse: begin {run}'\n\
         /run/rouse/tests --test-threads=1 {test_args} {redirection}\ncode=$?\n\
         echo \"rouse: end {run} $code\"\n"
    )
}

/// Prints the tables. Fails if a result on any kernel is wrong.
fn report_outcomes(outcomes: &[KernelOutcome], json: Option<&Path>) -> Result<()> {
    println!("\n{}", KernelTables(outcomes));
    if let Some(file) = json {
        let text = serde_json::to_string_pretty(outcomes)? + "\n";
        fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    for outcome in outcomes.iter().filter(|it| !it.errors.is_empty()) {
        // Below the tables, where the end of a long log is read first.
        for failure in &outcome.test_counts.failures {
            println!("{}: {}\n", outcome.kernel, failure.join("\n  "));
        }
        println!("{}: {}", outcome.kernel, outcome.errors.join("\n"));
    }
    let failed: Vec<_> = outcomes.iter().filter(|it| !it.errors.is_empty()).collect();
    if !failed.is_empty() {
        let names: Vec<_> = failed.iter().map(|it| it.kernel).collect();
        bail!("loads or tests failed on Linux {}", names.join(", "));
    }
    Ok(())
}
