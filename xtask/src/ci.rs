//! Shell: checks that every change must pass, without root.

use anyhow::{Result, bail};

use crate::{sh, tidy, workspace::CargoWorkspace};

/// Arguments of the command `cargo xtask ci`.
#[derive(Debug, clap::Args)]
pub(crate) struct CiArgs {
    /// Go on after a failure, to see all of them
    #[arg(long)]
    keep_going: bool,
}

/// Name of a step, and its function.
type CiStep = (&'static str, fn(&CargoWorkspace) -> Result<()>);

const STEPS: [CiStep; 9] = [
    ("fmt", |workspace| run_cargo(workspace, &["fmt", "--all", "--check"])),
    ("clippy", |workspace| {
        run_cargo(workspace, &["clippy", "--all-targets", "--", "-D", "warnings"])
    }),
    ("clippy-root", |workspace| {
        run_cargo(workspace, &["clippy", "-p", "tests", "--all-targets", "--", "-D", "warnings"])
    }),
    // Plain `cargo test` does not build these, because they need an API server.
    ("check-apiserver", |workspace| {
        let tests = ["--test", "apiserver", "--test", "platform", "--test", "webhook"];
        run_cargo(workspace, &[&["check", "-p", "controller"][..], &tests].concat())
    }),
    ("doc", check_docs),
    ("test", |workspace| run_cargo(workspace, &["xtask", "test", "--tier", "pure,shell"])),
    ("tidy", |_| tidy::run()),
    ("commits", |_| tidy::check_commit_subjects()),
    ("deny", check_dependencies),
];

/// Runs `cargo xtask ci`: all steps, up to the first that fails.
pub(crate) fn run(args: &CiArgs) -> Result<()> {
    let workspace = CargoWorkspace::load()?;
    let mut failed = Vec::new();
    for (name, step) in STEPS {
        println!("\n== {name} ==");
        if let Err(error) = step(&workspace) {
            eprintln!("{name}: {error:#}");
            failed.push(name);
            if !args.keep_going {
                break;
            }
        }
    }
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    println!("\nci: all {} steps passed", STEPS.len());
    Ok(())
}

fn run_cargo(workspace: &CargoWorkspace, args: &[&str]) -> Result<()> {
    sh::run(sh::cargo().args(args).current_dir(&workspace.root))
}

fn check_docs(workspace: &CargoWorkspace) -> Result<()> {
    sh::run(
        sh::cargo()
            .args(["doc", "--quiet", "--no-deps", "--document-private-items"])
            .env("RUSTDOCFLAGS", "-D warnings")
            .current_dir(&workspace.root),
    )
}

/// Checks licences, sources and bans always, and advisories only if the list can be fetched.
fn check_dependencies(workspace: &CargoWorkspace) -> Result<()> {
    if sh::which("cargo-deny").is_none() {
        bail!("cargo-deny is missing; install it with `cargo install --locked cargo-deny`");
    }
    run_cargo(workspace, &["deny", "--all-features", "check", "bans", "licenses", "sources"])?;
    if let Err(error) = run_cargo(workspace, &["deny", "--all-features", "check", "advisories"]) {
        // Without network the list cannot be fetched, which must not fail a build.
        if std::env::var_os("ROUSE_ADVISORIES").is_some() {
            return Err(error);
        }
        println!(
            "deny: advisories were not checked or not clean (set ROUSE_ADVISORIES=1 to insist): {error:#}"
        );
    }
    Ok(())
}
