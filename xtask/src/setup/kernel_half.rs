//! Shell: installs what the kernel half is built with: from Debian's packages where they are new enough, else by rustup.

use std::process::{Command, Stdio};

use anyhow::{Result, bail};

use super::{agreed, install_packages};
use crate::{
    sh,
    toolchain::{self, Lack},
};

/// Installs what is missing until nothing is.
pub(super) fn prepare(yes: bool) -> Result<()> {
    let mut before = None;
    while let Some(lack) = toolchain::lack() {
        if before == Some(lack) {
            // What was installed did not help; this says what would.
            return toolchain::Toolchain::find().map(drop);
        }
        install(lack, yes)?;
        before = Some(lack);
    }
    Ok(())
}

fn install(lack: Lack, yes: bool) -> Result<()> {
    match lack {
        Lack::Compiler if has_recent_package() => install_packages(
            &[
                ("rustc-web", "compiles the kernel half"),
                ("cargo-web", "runs that compiler"),
                ("rust-web-src", "holds the sources of core, which is built for the kernel"),
            ],
            yes,
        ),
        Lack::Compiler => install_nightly(yes),
        Lack::Llvm(version) => {
            let package = format!("llvm-{version}-dev");
            let why = "builds bpf-linker, which must have the compiler's LLVM";
            install_packages(&[(&package, why), ("g++", "links LLVM, which is C++")], yes)
        }
    }
}

fn install_nightly(yes: bool) -> Result<()> {
    let words = ["toolchain", "install", "nightly", "--profile", "minimal", "-c", "rust-src"];
    let by_hand = format!("rustup {}", words.join(" "));
    if sh::which("rustup").is_none() {
        bail!("the kernel half needs a nightly compiler: install rustup (https://rustup.rs)");
    }
    println!("Missing on this machine:\n  a nightly compiler with rust-src, for the kernel half");
    if !yes && !agreed("Install it with rustup?")? {
        bail!("install it with `{by_hand}`, or pass --yes");
    }
    sh::run(Command::new("rustup").args(words))
}

/// Whether apt would install a compiler that is new enough; Debian has one for building browsers.
fn has_recent_package() -> bool {
    let policy = Command::new("apt-cache")
        .args(["policy", "rustc-web"])
        .stderr(Stdio::null())
        .output()
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    let candidate = policy.lines().find_map(|line| line.trim().strip_prefix("Candidate: "));
    candidate.is_some_and(toolchain::is_recent)
}
