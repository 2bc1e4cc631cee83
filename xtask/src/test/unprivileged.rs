//! Shell: tests of all packages that need no root, divided into the tiers pure and shell.

use std::{
    fs,
    io::{self, Read as _},
    path::Path,
    process::Command,
    sync::{Mutex, PoisonError, mpsc},
    thread,
};

use anyhow::{Context as _, Result};

use super::{
    ListedTests, TestArgs, TestCounts, TestTier, TierOutcome,
    build::{TestBuilder, TestProgram},
    list_tests, source_tier,
};
use crate::setup::{self, SetupPurpose};

/// Environment variable that makes tests with rounds run as many of them as a release requires, for up to an hour.
const LONG_VARIABLE: &str = "ROUSE_LONG";
/// Number of programs that run at a time. The three longest ones of the shell tier wait more than they compute.
const PARALLELISM: usize = 3;
/// Programs that take longest, a minute and more each. They begin first, so that none runs alone at the end.
const LONGEST_PROGRAMS: [&str; 6] = [
    "streams/tests/h2.rs",
    "streams/tests/h1.rs",
    "controller/src/lib.rs",
    "activator/loopback/../tests/loopback/main.rs",
    "activator/tests/slots.rs",
    "activator/tests/resident.rs",
];

/// A test program with the tests to run.
#[derive(Debug)]
struct TestCommand {
    /// Path of its root source file, for display.
    source: String,
    command: Command,
}

/// Tests of a program that a run selects.
#[derive(Debug)]
struct SelectedTests {
    names: Vec<String>,
    /// True if some of them run with `--long` only.
    has_long: bool,
    /// Number of such tests that do not run.
    skipped: usize,
}

/// Runs the tests of `tier` whose name contains one of `args.names`, or all tests.
pub(super) fn run(tier: TestTier, args: &TestArgs, builder: &TestBuilder) -> Result<TierOutcome> {
    let (mut needs_packages, mut skipped) = (false, 0);
    let workspace = &builder.workspace;
    let root_tests = workspace.root.join("tests").display().to_string();
    // The library of that package has ordinary tests.
    let library = format!("{root_tests}/src/lib.rs");
    let needs_root = |it: &TestProgram| it.folder == root_tests && it.source != library;
    let mut commands = Vec::new();
    for built in builder.build_all_tests()?.into_iter().filter(|it| !needs_root(it)) {
        let tests = select_tests(&built, tier, args)?;
        needs_packages |= tests.has_long;
        skipped += tests.skipped;
        if tests.names.is_empty() {
            continue;
        }
        let root = format!("{}/", workspace.root.display());
        let source = built.source.trim_start_matches(&root).to_owned();
        let mut command = Command::new(&built.executable);
        command.args(["--exact", "--quiet"]).args(&tests.names).current_dir(&built.folder);
        command.args(tests.has_long.then_some("--include-ignored"));
        if args.long {
            command.env(LONG_VARIABLE, "1");
        }
        commands.push(TestCommand { source, command });
    }
    // The longest ones start first, or they would run alone at the end.
    let rank = |it: &TestCommand| LONGEST_PROGRAMS.iter().position(|source| *source == it.source);
    commands.sort_by_key(|it| rank(it).unwrap_or(LONGEST_PROGRAMS.len()));
    if needs_packages {
        setup::prepare(&[SetupPurpose::LongTest], args.yes)?;
    }
    let mut outcome = run_parallel(commands)?;
    if let TierOutcome::Ran { skipped_note, .. } = &mut outcome
        && skipped > 0
    {
        skipped_note.push_str(&format!("; skipped {skipped} that need large packages (--long)"));
    }
    Ok(outcome)
}

/// Runs programs in parallel. The output of each is printed as a whole when it has ended.
fn run_parallel(commands: Vec<TestCommand>) -> Result<TierOutcome> {
    // Threads take the next program when they are free, in the order of the list.
    let queue = Mutex::new(commands.into_iter());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    thread::scope(|scope| {
        let (send, results) = mpsc::channel();
        for _ in 0..PARALLELISM {
            let send = send.clone();
            scope.spawn(move || {
                while let Some(tests) = next() {
                    let source = tests.source.clone();
                    // The receiver exists until all have ended, unless one could not run.
                    send.send((source, run_program(tests))).ok();
                }
            });
        }
        drop(send);
        let mut outcome = TierOutcome::empty();
        for (source, result) in results {
            let (text, has_passed) =
                result.with_context(|| format!("cannot run the tests of {source}"))?;
            println!("{source}\n{text}");
            let mut counts = TestCounts::default();
            text.lines().for_each(|line| counts.parse_line(line));
            let skipped_note = String::new();
            outcome = outcome.combine(TierOutcome::Ran { counts, has_passed, skipped_note });
        }
        Ok(outcome)
    })
}

/// Runs a test program to its end. Returns its output, and true if the tests passed.
fn run_program(tests: TestCommand) -> Result<(String, bool)> {
    let TestCommand { source, mut command } = tests;
    println!("{source} starts");
    let (mut reader, writer) = io::pipe()?;
    command.stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn()?;
    // The command holds the pipe's write end, so reading would never end.
    drop(command);
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes)?;
    Ok((String::from_utf8_lossy(&bytes).into_owned(), child.wait()?.success()))
}

/// Selects the tests of a program that belong to the tier. A test that is named is wanted, whatever it needs.
fn select_tests(built: &TestProgram, tier: TestTier, args: &TestArgs) -> Result<SelectedTests> {
    let ListedTests { usual: mut names, mut long } = list_tests(Path::new(&built.executable))?;
    let is_named = |test: &str| args.names.iter().any(|name| test.contains(name));
    let is_selected = |test: &String| {
        (args.names.is_empty() || is_named(test)) && tier_of_test(built, test) == tier
    };
    names.retain(is_selected);
    long.retain(is_selected);
    if args.long || !args.names.is_empty() {
        let has_long = !long.is_empty();
        names.append(&mut long);
        return Ok(SelectedTests { names, has_long, skipped: 0 });
    }
    Ok(SelectedTests { names, has_long: false, skipped: long.len() })
}

fn tier_of_test(built: &TestProgram, test: &str) -> TestTier {
    let files = source_tier::candidate_files(&built.source, test);
    let first_line = |file: String| Some(fs::read_to_string(file).ok()?.lines().next()?.to_owned());
    // A file that is not marked pure may do any I/O.
    files
        .into_iter()
        .filter_map(first_line)
        .find_map(|line| source_tier::tier_of(&line))
        .unwrap_or(TestTier::Shell)
}
