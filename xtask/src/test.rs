//! Shell: builds and runs the tests, tier by tier, and ends with a table.

mod cluster;
mod sort;
mod unprivileged;

use std::{
    ffi::OsStr,
    fmt, fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

use crate::{
    build, build_ebpf, image,
    setup::{self, Purpose},
    sh,
    workspace::Workspace,
};

/// Which tests.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Tiers to run, separated by commas; without it all that exist
    #[arg(long, value_delimiter = ',', value_name = "TIER,…")]
    tier: Vec<Tier>,
    /// Install what the tests need without asking
    #[arg(long)]
    yes: bool,
    /// Only build the test program of the tier kernel or local, and copy it to FILE
    #[arg(long, value_name = "FILE")]
    build_only: Option<PathBuf>,
    /// Test the cluster that FILE leads to, in place of one that xtask makes
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Run only tests whose name contains one of these
    #[arg(last = true, value_name = "NAME")]
    names: Vec<String>,
}

/// A kind of test, from the least to the most that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Tier {
    /// Decisions and formulas; nothing outside the process
    Pure,
    /// Sockets on loopback, files
    Shell,
    /// Real programs in the running kernel, in namespaces; root
    Kernel,
    /// The local node as a whole; root
    Local,
    /// A real Kubernetes; root
    Cluster,
}

impl Tier {
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
}

/// How a tier went.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    /// It ran; counts as libtest gave them, whether everything passed, and what was left out and why.
    Ran { counts: Counts, ok: bool, left_out: String },
    /// It could not run, and should have.
    CannotRun(String),
}

impl Outcome {
    /// Nothing ran yet.
    fn nothing() -> Self {
        Self::Ran { counts: Counts::default(), ok: true, left_out: String::new() }
    }

    /// This and then `next`, as one.
    fn and(self, next: Self) -> Self {
        match (self, next) {
            (
                Self::Ran { counts: first, ok, left_out },
                Self::Ran { counts: second, ok: next_ok, left_out: more },
            ) => Self::Ran {
                counts: Counts {
                    passed: first.passed + second.passed,
                    failed: first.failed + second.failed,
                },
                ok: ok && next_ok,
                left_out: left_out + &more,
            },
            (Self::CannotRun(why), _) | (_, Self::CannotRun(why)) => Self::CannotRun(why),
        }
    }
}

/// Tests that ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
}

impl Counts {
    /// Adds what a line of libtest's output says, if it is a closing line.
    fn absorb(&mut self, line: &str) {
        let Some(rest) = line.trim().strip_prefix("test result: ") else { return };
        let number = |word: &str| -> u64 {
            let before =
                rest.split(&[';', '.'][..]).find_map(|part| part.trim().strip_suffix(word));
            before.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
        };
        self.passed += number(" passed");
        self.failed += number(" failed");
    }
}

/// `cargo xtask test`.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    if let Some(file) = &args.build_only {
        return build_only(&args.tier, file, &workspace);
    }
    let asked = if args.tier.is_empty() { Tier::ALL.to_vec() } else { args.tier.clone() };
    // In the order of what they need: a broken formula shows before a cluster is built.
    let tiers = Tier::ALL.into_iter().filter(|tier| asked.contains(tier));
    let mut rows = Vec::new();
    for tier in tiers {
        println!("\n== {} ==", tier.name());
        let started = Instant::now();
        let outcome = run_tier(tier, args, &workspace)
            .unwrap_or_else(|error| Outcome::CannotRun(format!("{error:#}")));
        rows.push(Row { tier, outcome, seconds: started.elapsed().as_secs_f64() });
    }
    conclude(&rows)
}

fn run_tier(tier: Tier, args: &Args, workspace: &Workspace) -> Result<Outcome> {
    match tier {
        Tier::Pure | Tier::Shell => unprivileged::run(tier, &args.names, workspace),
        Tier::Kernel => {
            setup::prepare(&[Purpose::Build, Purpose::Kernel, Purpose::Test], args.yes)?;
            privileged("kernel", args, workspace, &[], &[])
        }
        Tier::Local => {
            setup::prepare(&[Purpose::Build, Purpose::Node, Purpose::Test], args.yes)?;
            image::make(workspace, &["hello"], &workspace.target.join("images"))?;
            build::rouse(workspace, false)?;
            privileged("local", args, workspace, &[], &[])
        }
        Tier::Cluster => cluster::run(args, workspace),
    }
}

/// Builds one target of the package `tests` as us, and runs it as root.
fn privileged(
    target: &str,
    args: &Args,
    workspace: &Workspace,
    more: &[(&str, &OsStr)],
    words: &[&str],
) -> Result<Outcome> {
    if !workspace.root.join(format!("tests/{target}/main.rs")).is_file() {
        bail!("tests/{target}/main.rs does not exist");
    }
    let object = build_ebpf::object(workspace)?;
    let executable = build_tests(target, &object, workspace)?;
    let rouse = workspace.target.join("debug/rouse");
    let images = workspace.target.join("images");
    let mut vars = vec![
        ("ROUSE_BIN", rouse.as_os_str()),
        ("ROUSE_IMAGES", images.as_os_str()),
        (build_ebpf::VARIABLE, object.as_os_str()),
    ];
    vars.extend(more);
    let mut command = sh::raised_with(&executable, &vars);
    // One at a time: they share the machine's CPUs, and some compare counts under load.
    command
        .args(&args.names)
        .args(words)
        .arg("--test-threads=1")
        .current_dir(workspace.root.join("tests"));
    run_counted(&mut command)
}

/// Leaves the program of one root tier in `file`, to be run on another machine.
fn build_only(tiers: &[Tier], file: &Path, workspace: &Workspace) -> Result<()> {
    let [tier @ (Tier::Kernel | Tier::Local)] = tiers else {
        bail!("--build-only needs `--tier kernel` or `--tier local`");
    };
    let object = build_ebpf::object(workspace)?;
    let program = build_tests(tier.name(), &object, workspace)?;
    fs::copy(&program, file)
        .with_context(|| format!("cannot copy {program} to {}", file.display()))?;
    println!("test: {} holds the {} tier", file.display(), tier.name());
    Ok(())
}

fn build_tests(target: &str, object: &Path, workspace: &Workspace) -> Result<String> {
    let mut command = sh::cargo();
    command.env(build_ebpf::VARIABLE, object);
    command.args(["test", "--quiet", "--package", "tests", "--test", target, "--no-run"]);
    command.current_dir(&workspace.root);
    let built = executables(&mut command)?;
    built
        .into_iter()
        .map(|built| built.executable)
        .next()
        .with_context(|| format!("cargo built no test program for tests/{target}"))
}

/// A test program that cargo built.
#[derive(Debug)]
struct Built {
    /// Folder of its package.
    folder: String,
    /// Its root source file.
    source: String,
    executable: String,
}

/// Runs a `cargo test --no-run` and returns the test programs it names.
fn executables(command: &mut Command) -> Result<Vec<Built>> {
    let mut built = Vec::new();
    command.arg("--message-format=json-render-diagnostics");
    let ok = sh::watch(command, |line| {
        let message: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
        let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
        let manifest = text(&message["manifest_path"]).unwrap_or_default();
        // Programs that only some test needs, and examples, are named too.
        let is_test = message["profile"]["test"] == true;
        if let Some(executable) = text(&message["executable"]).filter(|_| is_test) {
            built.push(Built {
                folder: manifest.trim_end_matches("/Cargo.toml").to_owned(),
                source: text(&message["target"]["src_path"]).unwrap_or_default(),
                executable,
            });
        }
    })?;
    if !ok {
        bail!("the tests do not compile");
    }
    Ok(built)
}

/// Runs a test program, shows its output, and counts.
fn run_counted(command: &mut Command) -> Result<Outcome> {
    let mut counts = Counts::default();
    let ok = sh::watch(command, |line| {
        println!("{line}");
        counts.absorb(line);
    })?;
    Ok(Outcome::Ran { counts, ok, left_out: String::new() })
}

/// A tier and how it went.
#[derive(Debug)]
struct Row {
    tier: Tier,
    outcome: Outcome,
    seconds: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, detail) = match &self.outcome {
            Outcome::Ran { counts, ok, left_out } => (
                if *ok { "passed" } else { "FAILED" },
                // Never silent: what was not run must not look as if it had passed.
                format!("{} passed, {} failed{left_out}", counts.passed, counts.failed),
            ),
            Outcome::CannotRun(why) => ("FAILED", format!("cannot run: {why}")),
        };
        write!(out, "{:<8} {word:<8} {:>6.1} s  {detail}", self.tier.name(), self.seconds)
    }
}

/// Prints the table; an error unless every tier that should run ran and passed.
fn conclude(rows: &[Row]) -> Result<()> {
    println!("\ntier     result     time");
    let mut total = Counts::default();
    let mut bad = Vec::new();
    for row in rows {
        println!("{row}");
        match &row.outcome {
            Outcome::Ran { counts, ok, .. } => {
                total.passed += counts.passed;
                total.failed += counts.failed;
                if !ok {
                    bad.push(row.tier.name());
                }
            }
            Outcome::CannotRun(_) => bad.push(row.tier.name()),
        }
    }
    println!("\ntotal: {} passed, {} failed", total.passed, total.failed);
    if !bad.is_empty() {
        bail!("not every tier passed: {}", bad.join(", "));
    }
    if total.passed == 0 {
        bail!("no test ran");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_from_closing_lines_only() {
        let mut counts = Counts::default();
        counts.absorb("test plan::tests::x ... ok");
        counts.absorb("test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.01s");
        counts.absorb(
            "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
        );
        assert_eq!(counts, Counts { passed: 15, failed: 2 });
    }

    #[test]
    fn a_run_without_a_test_is_no_success() {
        let ran = Row {
            tier: Tier::Pure,
            outcome: Outcome::Ran {
                counts: Counts { passed: 1, failed: 0 },
                ok: true,
                left_out: String::new(),
            },
            seconds: 0.0,
        };
        assert!(conclude(&[ran]).is_ok());
        assert!(conclude(&[]).is_err());
    }

    #[test]
    fn a_tier_that_cannot_run_fails_the_whole() {
        let row =
            Row { tier: Tier::Kernel, outcome: Outcome::CannotRun("no root".into()), seconds: 0.0 };
        assert_eq!(row.to_string(), "kernel   FAILED      0.0 s  cannot run: no root");
        assert!(conclude(&[row]).is_err());
    }
}
