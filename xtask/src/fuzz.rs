//! Shell: runs of the fuzz targets, by cargo-fuzz and a nightly compiler.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{sh, toolchain, workspace::CargoWorkspace};

/// Version of cargo-fuzz to install if there is none.
const CARGO_FUZZ_VERSION: &str = "0.13.2";

/// Target to fuzz, and for how long.
#[derive(Debug, clap::Args)]
pub(crate) struct FuzzArgs {
    /// Name of the target; all targets, one after another, when none is named
    target: Option<String>,
    /// Seconds that each target runs
    #[arg(long, default_value_t = 60)]
    seconds: u32,
}

/// Runs the targets of `cargo xtask fuzz`.
pub(crate) fn run(args: &FuzzArgs) -> Result<()> {
    let workspace = CargoWorkspace::load()?;
    let folder = workspace.root.join("fuzz");
    let targets = targets(&folder)?;
    let chosen = match &args.target {
        None => targets,
        Some(target) if targets.contains(target) => vec![target.clone()],
        Some(target) => bail!("there is no target {target}; there are {}", targets.join(", ")),
    };
    // Only after the target is checked: a first build takes minutes.
    let cargo_fuzz = cargo_fuzz()?;
    for target in chosen {
        run_target(&target, args.seconds, &folder, &workspace.target, &cargo_fuzz)?;
    }
    Ok(())
}

/// Names of the targets that have a file.
fn targets(folder: &Path) -> Result<Vec<String>> {
    let folder = folder.join("targets");
    let entries =
        fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut targets = Vec::new();
    for entry in entries {
        let path = entry?.path();
        targets.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
    }
    targets.sort();
    Ok(targets)
}

/// Runs one target for a time, from the inputs of the corpus on.
fn run_target(
    target: &str,
    seconds: u32,
    folder: &Path,
    out: &Path,
    cargo_fuzz: &Path,
) -> Result<()> {
    // New inputs of the fuzzer stay in the target directory; only selected ones are added to the corpus by hand.
    let corpus = out.join("fuzz/corpus").join(target);
    fs::create_dir_all(&corpus).with_context(|| format!("cannot make {}", corpus.display()))?;
    let result = sh::run(
        nightly_command(cargo_fuzz)
            // The fuzzed code is safe Rust, so an address sanitizer could find nothing.
            .args(["fuzz", "run", "--release", "--sanitizer", "none", "--fuzz-dir"])
            .arg(folder)
            .arg("--target-dir")
            .arg(out.join("fuzz"))
            .arg(target)
            .arg(&corpus)
            .arg(folder.join("corpus").join(target))
            .arg("--")
            .arg(format!("-max_total_time={seconds}"))
            .args(["-max_len=16384", "-timeout=10", "-print_final_stats=1"]),
    );
    result.with_context(|| {
        let artifacts = folder.join("artifacts").join(target);
        format!(
            "{target} failed: its input lies in {}; once it is understood it belongs into {}",
            artifacts.display(),
            folder.join("corpus").join(target).display()
        )
    })
}

/// Command that runs `program` with the nightly compiler.
fn nightly_command(program: &Path) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly"]).arg(program);
    // The calling cargo and rustup have set these; they name the stable toolchain.
    for name in ["CARGO", "RUSTUP_TOOLCHAIN", "RUSTFLAGS", "CARGO_TARGET_DIR"] {
        command.env_remove(name);
    }
    command
}

/// Path of cargo-fuzz: the system's, or one in the cache, built if missing.
fn cargo_fuzz() -> Result<PathBuf> {
    if sh::which("rustup").is_none() {
        bail!("fuzzing needs a nightly compiler: install rustup (https://rustup.rs)");
    }
    // Any installed version will do; the pinned one is only for machines without it.
    if let Some(path) = sh::which("cargo-fuzz") {
        return Ok(path);
    }
    let folder = toolchain::cache_directory()?.join(format!("cargo-fuzz-{CARGO_FUZZ_VERSION}"));
    let program = folder.join("bin/cargo-fuzz");
    if !program.exists() {
        println!("building cargo-fuzz {CARGO_FUZZ_VERSION} into {} (once)", folder.display());
        sh::run(
            sh::cargo()
                .args([
                    "install",
                    "cargo-fuzz",
                    "--locked",
                    "--version",
                    CARGO_FUZZ_VERSION,
                    "--root",
                ])
                .arg(&folder)
                .env_remove("CARGO_TARGET_DIR"),
        )?;
    }
    Ok(program)
}
