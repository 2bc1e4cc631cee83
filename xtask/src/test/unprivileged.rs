//! Shell: the tests of all packages but root's, sorted into the tiers pure and shell.

use std::{fs, path::Path, process::Command};

use anyhow::Result;

use super::{
    Args, Outcome, Tier,
    build::{Builder, Built},
    names_in, run_counted, sort,
};

/// Tells tests that they may take an hour: those that repeat something do it as often as a release asks for.
const LONG: &str = "ROUSE_LONG";

/// Runs the tests of `tier` whose name contains one of `names`, or all.
pub(super) fn run(tier: Tier, args: &Args, builder: &Builder) -> Result<Outcome> {
    let names = &args.names;
    let workspace = &builder.workspace;
    let of_root = workspace.root.join("tests").display().to_string();
    let mut outcome = Outcome::nothing();
    for built in builder.tests(&[])?.into_iter().filter(|it| it.folder != of_root) {
        let tests = tests_of(&built, tier, names)?;
        if tests.is_empty() {
            continue;
        }
        println!("{}", built.source.trim_start_matches(&format!("{}/", workspace.root.display())));
        let mut command = Command::new(&built.executable);
        command.args(["--exact", "--quiet"]).args(&tests).current_dir(&built.folder);
        if args.long {
            command.env(LONG, "1");
        }
        outcome = outcome.and(run_counted(&mut command)?);
    }
    // Examples in documents are small and pure.
    if tier == Tier::Pure && names.is_empty() {
        outcome = outcome.and(run_counted(&mut builder.cargo_test(&["--doc"]))?);
    }
    Ok(outcome)
}

fn tests_of(built: &Built, tier: Tier, names: &[String]) -> Result<Vec<String>> {
    let mut tests = names_in(Path::new(&built.executable))?;
    let wanted = |test: &str| names.is_empty() || names.iter().any(|name| test.contains(name));
    tests.retain(|test| wanted(test) && tier_of_test(built, test) == tier);
    Ok(tests)
}

fn tier_of_test(built: &Built, test: &str) -> Tier {
    let files = sort::candidates(&built.source, test);
    let first_line = |file: String| Some(fs::read_to_string(file).ok()?.lines().next()?.to_owned());
    // A file that does not say it is pure may touch anything.
    files
        .into_iter()
        .filter_map(first_line)
        .find_map(|line| sort::tier_of(&line))
        .unwrap_or(Tier::Shell)
}
