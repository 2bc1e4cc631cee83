//! Shell: installs the compiler and LLVM for the eBPF programs: Debian's packages if new enough, else by rustup.

use std::process::{Command, Stdio};

use anyhow::{Result, bail};

use super::{confirm, install_packages};
use crate::{
    sh,
    toolchain::{self, MissingTool},
};

/// Installs missing tools, one after the other, until none is missing.
pub(super) fn prepare(yes: bool) -> Result<()> {
    let mut before = None;
    while let Some(missing_tool) = toolchain::missing_tool() {
        if before == Some(missing_tool) {
            // The installed package did not help: `find` fails with a message about what would.
            return toolchain::EbpfToolchain::find().map(drop);
        }
        install(missing_tool, yes)?;
        before = Some(missing_tool);
    }
    Ok(())
}

fn install(missing_tool: MissingTool, yes: bool) -> Result<()> {
    let recent = candidate_version("rustc-web").as_deref().is_some_and(toolchain::is_recent);
    match missing_tool {
        MissingTool::Compiler if recent => install_system(yes),
        MissingTool::Compiler => install_nightly(yes),
        MissingTool::Llvm(version) => {
            let package = format!("llvm-{version}-dev");
            // Debian's compiler has an LLVM of Debian, for which there is a package.
            if recent && candidate_version(&package).is_none() {
                println!("There is no package {package} for the nightly compiler's LLVM.");
                return install_system(yes);
            }
            let reason = "builds bpf-linker, which must have the compiler's LLVM";
            install_packages(&[(&package, reason), ("g++", "links LLVM, which is C++")], yes)
        }
    }
}

/// Installs Debian's compiler for web browsers, which Debian keeps recent.
fn install_system(yes: bool) -> Result<()> {
    let packages = [
        ("rustc-web", "compiles the eBPF programs"),
        ("cargo-web", "runs that compiler"),
        ("rust-web-src", "holds the sources of core, which is built for the kernel"),
    ];
    install_packages(&packages, yes)
}

fn install_nightly(yes: bool) -> Result<()> {
    let args = ["toolchain", "install", "nightly", "--profile", "minimal", "-c", "rust-src"];
    let by_hand = format!("rustup {}", args.join(" "));
    if sh::which("rustup").is_none() {
        bail!("the eBPF programs need a nightly compiler: install rustup (https://rustup.rs)");
    }
    println!("Missing on this machine:\n  a nightly compiler with rust-src, for the eBPF programs");
    if !yes && !confirm("Install it with rustup?")? {
        bail!("install it with `{by_hand}`, or pass --yes");
    }
    sh::run(Command::new("rustup").args(args))
}

/// Version of a package that apt would install; `None` if there is none.
fn candidate_version(package: &str) -> Option<String> {
    let mut apt = Command::new("apt-cache");
    let output = apt.args(["policy", package]).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text.lines().find_map(|line| line.trim().strip_prefix("Candidate: "))?;
    (version != "(none)").then(|| version.to_owned())
}
