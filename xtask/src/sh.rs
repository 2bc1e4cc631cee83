//! Shell: subprocesses, as root through sudo where a step needs it.

use std::{
    ffi::{OsStr, OsString},
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

/// Environment variables passed through sudo, which drops all others: those that the programs and tests read.
const PRESERVED_VARIABLES: [&str; 10] = [
    "CARGO_TARGET_DIR",
    "ROUSE_CONFORMANCE_TEST",
    "ROUSE_INSTALL_ROUNDS",
    "ROUSE_LONG_REQUEST_S",
    "ROUSE_STANDBY_PROBES",
    "ROUSE_STANDBY_ROUNDS",
    "ROUSE_STOPPING_REQUESTS",
    "RUST_BACKTRACE",
    "RUST_LOG",
    "TERM",
];

/// Command `cargo`: the executable that started xtask, so that nested and raised calls use the same one.
///
/// It removes the variables with which cargo describes xtask: build scripts of dependencies (`ring`) watch them. All
/// dependents would be built again after each change between a user's call of cargo and xtask's.
pub(crate) fn cargo() -> Command {
    let mut cargo =
        Command::new(std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
    for (name, _) in std::env::vars_os() {
        let prefixes = ["CARGO_PKG_", "CARGO_MANIFEST_"];
        if name.to_str().is_some_and(|name| prefixes.iter().any(|it| name.starts_with(it))) {
            cargo.env_remove(name);
        }
    }
    cargo
}

/// Returns true if this process runs as root.
pub(crate) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Command `program` as root: directly if xtask is root, else through sudo with `PATH`, `HOME` and
/// [`PRESERVED_VARIABLES`].
pub(crate) fn root_command(program: impl AsRef<OsStr>) -> Command {
    root_command_with(program, &[])
}

/// Command like [`root_command`], with additional variables for the program.
pub(crate) fn root_command_with(program: impl AsRef<OsStr>, vars: &[(&str, &OsStr)]) -> Command {
    if is_root() {
        let mut command = Command::new(program);
        command.envs(vars.iter().copied());
        return command;
    }
    let mut command = Command::new("sudo");
    // `env` sets the variables behind sudo, whose policy may refuse to pass them.
    command.arg("env");
    // sudo's own PATH would hide rustup's toolchain and programs in the user's home.
    let variables = PRESERVED_VARIABLES.iter().chain(&["PATH", "HOME"]);
    for name in variables {
        if let Some(value) = std::env::var_os(name) {
            command.arg(env_pair(name, &value));
        }
    }
    for (name, value) in vars {
        command.arg(env_pair(name, value));
    }
    command.arg(program);
    command
}

fn env_pair(name: &str, value: &OsStr) -> OsString {
    let mut pair = OsString::from(name);
    pair.push("=");
    pair.push(value);
    pair
}

/// Prints and runs `command`. A failed command is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    println!("$ {}", display_command(command));
    let status =
        command.status().with_context(|| format!("cannot start `{}`", display_command(command)))?;
    if !status.success() {
        bail!("`{}` ended with {status}", display_command(command));
    }
    Ok(())
}

/// Runs `command` and returns its standard output, without printing it.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    // Standard error is passed on: progress and errors of the command stay visible.
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start `{}`", display_command(command)))?;
    if !output.status.success() {
        bail!("`{}` ended with {}", display_command(command), output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs `command` and passes each line of its standard output to `line`. Returns true if it succeeded.
pub(crate) fn run_with_lines(command: &mut Command, mut line: impl FnMut(&str)) -> Result<bool> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{}`", display_command(command)))?;
    let stdout = child.stdout.take().context("the child's output was piped")?;
    for bytes in BufReader::new(stdout).split(b'\n') {
        let bytes =
            bytes.with_context(|| format!("cannot read from `{}`", display_command(command)))?;
        // Bytes that are no text are replaced: an error here would leave the command running without a reader.
        let text = String::from_utf8_lossy(&bytes);
        line(text.strip_suffix('\r').unwrap_or(&text));
    }
    Ok(child.wait()?.success())
}

/// Path of `program` on the `PATH`.
pub(crate) fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    // Directories of root's tools on Debian, which a user's PATH often lacks.
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

/// Sleeps for a while. xtask's main thread has no runtime that this could block.
#[allow(clippy::disallowed_methods, reason = "xtask's main thread waits for other processes")]
pub(crate) fn sleep(wait: Duration) {
    std::thread::sleep(wait);
}

fn display_command(command: &Command) -> String {
    let mut words = vec![Path::new(command.get_program()).file_name().unwrap_or_default()];
    words.extend(command.get_args());
    words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_no_text_do_not_end_the_output() {
        let mut lines = Vec::new();
        let mut command = Command::new("printf");
        command.arg(r"a\377b\r\nc");
        let is_success = run_with_lines(&mut command, |line| lines.push(line.to_owned())).unwrap();
        assert_eq!((is_success, lines), (true, vec!["a\u{fffd}b".to_owned(), "c".to_owned()]));
    }
}
