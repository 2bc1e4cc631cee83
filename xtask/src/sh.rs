//! Shell: other programs, with the step that needs root raised by sudo.

use std::{
    ffi::{OsStr, OsString},
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

/// Variables handed through sudo, which drops the rest: what our programs and tests read.
const KEPT: [&str; 7] = [
    "CARGO_TARGET_DIR",
    "ROUSE_INSTALL_ROUNDS",
    "ROUSE_LONG_REQUEST_S",
    "ROUSE_STOPPING_REQUESTS",
    "RUST_BACKTRACE",
    "RUST_LOG",
    "TERM",
];

/// The cargo that started us, so that a raised or nested call finds the same one.
///
/// Without what it told us about ourselves: build scripts of dependencies (`ring`) watch those variables, and everything
/// above them would be built anew after each change between a call of cargo by hand and one of ours.
pub(crate) fn cargo() -> Command {
    let mut cargo =
        Command::new(std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
    for (name, _) in std::env::vars_os() {
        let told = ["CARGO_PKG_", "CARGO_MANIFEST_"];
        if name.to_str().is_some_and(|name| told.iter().any(|it| name.starts_with(it))) {
            cargo.env_remove(name);
        }
    }
    cargo
}

/// Whether this process is root.
pub(crate) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// `program` as root: itself when we are root, through sudo otherwise, with our `PATH` and the kept variables.
pub(crate) fn raised(program: impl AsRef<OsStr>) -> Command {
    raised_with(program, &[])
}

/// Like [`raised`], with more variables set for the program.
pub(crate) fn raised_with(program: impl AsRef<OsStr>, vars: &[(&str, &OsStr)]) -> Command {
    if is_root() {
        let mut command = Command::new(program);
        command.envs(vars.iter().copied());
        return command;
    }
    let mut command = Command::new("sudo");
    // sudo's own PATH would hide rustup's toolchain and whatever else the user installed at home.
    command.arg("env");
    let kept = KEPT.iter().chain(&["PATH", "HOME"]);
    for name in kept {
        if let Some(value) = std::env::var_os(name) {
            command.arg(pair(name, &value));
        }
    }
    for (name, value) in vars {
        command.arg(pair(name, value));
    }
    command.arg(program);
    command
}

fn pair(name: &str, value: &OsStr) -> OsString {
    let mut pair = OsString::from(name);
    pair.push("=");
    pair.push(value);
    pair
}

/// Shows and runs `command`; anything but success is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    println!("$ {}", shown(command));
    let status = command.status().with_context(|| format!("cannot start `{}`", shown(command)))?;
    if !status.success() {
        bail!("`{}` ended with {status}", shown(command));
    }
    Ok(())
}

/// Runs `command` silently and returns what it printed.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start `{}`", shown(command)))?;
    if !output.status.success() {
        bail!("`{}` ended with {}", shown(command), output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs `command`, hands each line of its standard output to `line`, and says whether it succeeded.
pub(crate) fn watch(command: &mut Command, mut line: impl FnMut(&str)) -> Result<bool> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{}`", shown(command)))?;
    let stdout = child.stdout.take().context("the child's output was piped")?;
    for text in BufReader::new(stdout).lines() {
        line(&text.with_context(|| format!("cannot read from `{}`", shown(command)))?);
    }
    Ok(child.wait()?.success())
}

/// Where `program` is on the `PATH`.
pub(crate) fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    // Where Debian keeps root's tools; a user's PATH often lacks them.
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(system)
        .map(|folder| folder.join(program))
        .find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Waits. xtask's main thread has no runtime that this could block.
#[allow(clippy::disallowed_methods, reason = "xtask's main thread waits for other processes")]
pub(crate) fn pause(wait: Duration) {
    std::thread::sleep(wait);
}

fn shown(command: &Command) -> String {
    let mut words = vec![Path::new(command.get_program()).file_name().unwrap_or_default()];
    words.extend(command.get_args());
    words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
