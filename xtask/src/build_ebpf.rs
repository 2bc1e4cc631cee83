//! Shell: builds of the eBPF programs.

use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::{sh, toolchain::EbpfToolchain, workspace::CargoWorkspace};

/// Environment variable that passes the object's path to `agent/build.rs`.
pub(crate) const OBJECT_VARIABLE: &str = "ROUSE_EBPF_OBJECT";

/// Runs `cargo xtask build-ebpf`: builds the object and prints the variable that embeds it.
pub(crate) fn run() -> Result<()> {
    let object = build_object(&CargoWorkspace::load()?)?;
    println!("{OBJECT_VARIABLE}={}", object.display());
    Ok(())
}

/// Builds the object and returns its path. Quick if no source has changed.
pub(crate) fn build_object(workspace: &CargoWorkspace) -> Result<PathBuf> {
    let toolchain = EbpfToolchain::find()?;
    // A target directory of its own: artefacts of the other compiler would invalidate those of the shared one.
    let target = workspace.target.join("bpf");
    let triple =
        if cfg!(target_endian = "big") { "bpfeb-unknown-none" } else { "bpfel-unknown-none" };
    sh::run(
        toolchain
            .cargo()
            .args(["build", "--package", "ebpf", "--bins", "--release"])
            .args(["--target", triple, "-Z", "build-std=core", "--target-dir"])
            .arg(&target)
            .current_dir(&workspace.root)
            .env("CARGO_ENCODED_RUSTFLAGS", flags(&toolchain))
            // One unit and no LTO of rustc: bpf-linker optimises the whole.
            .env("CARGO_PROFILE_RELEASE_LTO", "false")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "2"),
    )?;
    let object = target.join(triple).join("release/rouse-ebpf");
    if !object.exists() {
        bail!(
            "the build succeeded but left no {}: remove {} and try again",
            object.display(),
            target.display()
        );
    }
    Ok(object)
}

fn flags(toolchain: &EbpfToolchain) -> String {
    let arch = std::env::consts::ARCH;
    let linker = toolchain.linker().display();
    [
        format!("--cfg=bpf_target_arch=\"{arch}\""),
        // Map definitions are part of BTF, which is made from debug information.
        "-Cdebuginfo=2".to_owned(),
        "-Clink-arg=--btf".to_owned(),
        // Without this, LLVM clears even eight bytes by a call of `memset`, and before 6.9 the kernel refuses every
        // call while a lock is held.
        "-Clink-arg=--disable-expand-memcpy-in-order".to_owned(),
        // Without this, every word of a packet at an unaligned offset is read byte by byte.
        "-Clink-arg=--cpu-features=+allows-misaligned-mem-access".to_owned(),
        // v2 adds the comparisons < and ≤ (kernel 4.14).
        "-Ctarget-cpu=v2".to_owned(),
        format!("-Clinker={linker}"),
    ]
    .join("\u{1f}")
}

#[cfg(test)]
mod tests {
    /// A plain build of `rouse` embeds a stub, whose agent refuses to start.
    #[test]
    fn the_readme_builds_the_command_with_the_programs() {
        let readme = include_str!("../../README.md");
        let build = "cargo build --release --package rouse";
        let (before, _) = readme.split_once(build).expect("it builds the command");
        let last_command = before
            .lines()
            .rfind(|line| line.starts_with("$ cargo xtask") || line.starts_with("$ export"));
        let last_command = last_command.expect("a command before it");
        assert!(last_command.starts_with("$ export $(cargo xtask build-ebpf | tail -n 1)"));
    }
}
