//! Shell: checks the abilities of this machine, and installs missing packages after asking.

mod ebpf_toolchain;
mod requirements;

use std::{
    io::{IsTerminal as _, Write as _},
    path::Path,
};

use anyhow::{Context as _, Result, bail};

pub(crate) use self::requirements::SetupPurpose;
use self::requirements::{MachineProperties, RequiredPackage};
use crate::{machine, sh};

/// Arguments of the command `cargo xtask setup`.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct SetupArgs {
    /// Install missing packages without asking
    #[arg(long)]
    pub(crate) yes: bool,
}

/// Runs `cargo xtask setup`: prepares for building, running, testing and measuring.
pub(crate) fn run(args: &SetupArgs) -> Result<()> {
    prepare(&SetupPurpose::ALL, args.yes)?;
    println!("setup: this machine is ready");
    Ok(())
}

/// Prepares the machine for `purposes`. Fails with the reasons if it cannot.
pub(crate) fn prepare(purposes: &[SetupPurpose], yes: bool) -> Result<()> {
    if purposes.iter().any(|purpose| purpose.needs_kernel()) {
        check_kernel()?;
    }
    let missing = requirements::missing_packages(purposes, is_installed);
    if !missing.is_empty() {
        install(&missing, yes)?;
    }
    match purposes.iter().any(|purpose| purpose.needs_ebpf_toolchain()) {
        true => ebpf_toolchain::prepare(yes),
        false => Ok(()),
    }
}

/// Returns true if a program is on the `PATH`, or if an absolute path exists.
fn is_installed(name: &str) -> bool {
    let file = Path::new(name);
    sh::which(name).is_some() || (file.is_absolute() && file.exists())
}

fn check_kernel() -> Result<()> {
    let machine = MachineProperties {
        kernel: machine::kernel(),
        has_cgroup2: machine::cgroup2().is_some(),
        capabilities: machine::capabilities(),
        is_root: sh::is_root(),
        has_sudo: sh::which("sudo").is_some(),
    };
    let lacking = requirements::unmet_requirements(&machine);
    if lacking.is_empty() {
        return Ok(());
    }
    bail!("this machine cannot run the eBPF programs:\n  - {}", lacking.join("\n  - "))
}

fn install(missing: &[&RequiredPackage], yes: bool) -> Result<()> {
    let packages: Vec<(&str, &str)> =
        missing.iter().map(|package| (package.package, package.reason)).collect();
    install_packages(&packages, yes)
}

/// Installs packages, after listing each with its reason and asking.
fn install_packages(packages: &[(&str, &str)], yes: bool) -> Result<()> {
    println!("Missing on this machine:");
    for (package, reason) in packages {
        println!("  {package:<22} {reason}");
    }
    let names: Vec<&str> = packages.iter().map(|(package, _)| *package).collect();
    let by_hand = format!("apt-get install --no-install-recommends {}", names.join(" "));
    if sh::which("apt-get").is_none() {
        bail!("this is no Debian or Ubuntu machine; install what `{by_hand}` would");
    }
    // No package is ever installed without consent.
    if !yes && !confirm("Install them with apt-get?")? {
        bail!("install them with `sudo {by_hand}`, or pass --yes");
    }
    sh::run(apt_command(&["update", "-qq"]).stdin(std::process::Stdio::null()))?;
    let mut args = vec!["install", "-qq", "-y", "--no-install-recommends"];
    args.extend(&names);
    sh::run(apt_command(&args).stdin(std::process::Stdio::null()))
        .with_context(|| format!("cannot install {}", names.join(", ")))
}

fn apt_command(args: &[&str]) -> std::process::Command {
    let mut command =
        sh::root_command_with("apt-get", &[("DEBIAN_FRONTEND", "noninteractive".as_ref())]);
    command.args(args);
    command
}

/// Asks on the terminal. Without a terminal the answer is no.
fn confirm(question: &str) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        return Ok(false);
    }
    print!("{question} [Y/n] ");
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "" | "y" | "Y" | "yes"))
}
