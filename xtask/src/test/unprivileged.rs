//! Shell: the tests of the default members, sorted into the tiers pure and shell.

use std::{fs, process::Command};

use anyhow::Result;

use super::{Built, Outcome, Tier, executables, run_counted, sort};
use crate::{sh, workspace::Workspace};

/// Runs the tests of `tier` whose name contains one of `names`, or all.
pub(super) fn run(tier: Tier, names: &[String], workspace: &Workspace) -> Result<Outcome> {
    let mut build = sh::cargo();
    build.args(["test", "--quiet", "--no-run"]).current_dir(&workspace.root);
    let mut outcome = Outcome::nothing();
    for built in executables(&mut build)? {
        let tests = tests_of(&built, tier, names)?;
        if tests.is_empty() {
            continue;
        }
        println!("{}", built.source.trim_start_matches(&format!("{}/", workspace.root.display())));
        let mut command = Command::new(&built.executable);
        command.args(["--exact", "--quiet"]).args(&tests).current_dir(&built.folder);
        outcome = outcome.and(run_counted(&mut command)?);
    }
    // Examples in documents are small and pure.
    if tier == Tier::Pure && names.is_empty() {
        let mut docs = sh::cargo();
        docs.args(["test", "--quiet", "--doc"]).current_dir(&workspace.root);
        outcome = outcome.and(run_counted(&mut docs)?);
    }
    Ok(outcome)
}

fn tests_of(built: &Built, tier: Tier, names: &[String]) -> Result<Vec<String>> {
    let listed =
        sh::capture(Command::new(&built.executable).args(["--list", "--format", "terse"]))?;
    let tests = listed.lines().filter_map(|line| line.strip_suffix(": test"));
    let wanted = |test: &&str| names.is_empty() || names.iter().any(|name| test.contains(name));
    Ok(tests
        .filter(wanted)
        .filter(|test| tier_of_test(built, test) == tier)
        .map(str::to_owned)
        .collect())
}

fn tier_of_test(built: &Built, test: &str) -> Tier {
    let files = sort::candidates(&built.folder, &built.source, test);
    let first_line = |file: String| Some(fs::read_to_string(file).ok()?.lines().next()?.to_owned());
    // A file that does not say it is pure may touch anything.
    files
        .into_iter()
        .filter_map(first_line)
        .find_map(|line| sort::tier_of(&line))
        .unwrap_or(Tier::Shell)
}
