//! Shell: the Go that builds the cluster's programs: the machine's own, or one fetched as a module.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};

use super::versions::{GO, Go};
use crate::{sh, toolchain};

/// A Go command that is new enough.
#[derive(Debug)]
pub(crate) struct Golang {
    go: PathBuf,
    /// Compiled packages; ours alone, so that it can be thrown away.
    cache: PathBuf,
}

impl Golang {
    /// Finds a Go on the `PATH` or in `/usr/local/go`; one that is too old fetches the right one.
    pub(crate) fn find() -> Result<Self> {
        let cache = toolchain::cache()?.join("go-build");
        let mut any = None;
        for go in candidates() {
            match version(&go) {
                Some(found) if found.is_enough() => return Ok(Self { go, cache }),
                Some(_) => any = any.or(Some(go)),
                None => {}
            }
        }
        let Some(old) = any else {
            bail!("Go is missing: install it (on Debian `apt-get install golang-go`)");
        };
        Ok(Self { go: fetched(&old)?, cache })
    }

    /// `go ARGS` in `folder`, gently: it shares the machine.
    pub(crate) fn command(&self, folder: &Path, args: &[String]) -> Command {
        let mut command = Command::new("nice");
        command.args(["-n", "5"]).arg(&self.go).args(args).current_dir(folder);
        command.env("GOCACHE", &self.cache);
        settings(&mut command);
        command
    }

    /// Throws the compiled packages away: gigabytes that only the next build of the same version would use.
    pub(crate) fn forget(&self) {
        let _absent = fs::remove_dir_all(&self.cache);
    }
}

fn settings(command: &mut Command) {
    // No C compiler takes part, so that the programs are static and run in any image.
    command.env("CGO_ENABLED", "0").env("GOFLAGS", "-mod=mod").env("GOTOOLCHAIN", "local");
    command.env("GOWORK", "off");
}

fn candidates() -> Vec<PathBuf> {
    let local = PathBuf::from("/usr/local/go/bin/go");
    sh::which("go").into_iter().chain(local.exists().then_some(local)).collect()
}

fn version(go: &Path) -> Option<Go> {
    let mut command = Command::new(go);
    command.arg("version").stderr(Stdio::null());
    settings(&mut command);
    Go::parse(&String::from_utf8_lossy(&command.output().ok()?.stdout))
}

/// Fetches Go itself through the module proxy, as `go` does since 1.21; also an older one can do it this way.
fn fetched(old: &Path) -> Result<PathBuf> {
    let home = toolchain::cache()?.join(GO.to_string());
    let go = home.join("bin/go");
    if version(&go).is_some() {
        return Ok(go);
    }
    println!("fetching {GO}, because {} is too old", old.display());
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let module = format!("golang.org/toolchain@v0.0.1-{GO}.linux-{arch}");
    let mut command = Command::new(old);
    command.args(["mod", "download", "-json", &module]).current_dir(std::env::temp_dir());
    settings(&mut command);
    let told: serde_json::Value = serde_json::from_str(&sh::capture(&mut command)?)?;
    let from = told["Dir"].as_str().with_context(|| format!("{module} came without a folder"))?;
    // Modules are kept read-only and without the right to run.
    let aside = home.with_extension("new");
    let _absent = fs::remove_dir_all(&aside);
    sh::run(Command::new("cp").args(["-r", "--no-preserve=mode", from]).arg(&aside))?;
    for folder in ["bin", &format!("pkg/tool/linux_{arch}")] {
        make_executable(&aside.join(folder))?;
    }
    let _absent = fs::remove_dir_all(&home);
    fs::rename(&aside, &home).with_context(|| format!("cannot make {}", home.display()))?;
    match version(&go) {
        Some(_) => Ok(go),
        None => bail!("the Go fetched to {} does not run", home.display()),
    }
}

fn make_executable(folder: &Path) -> Result<()> {
    let entries = fs::read_dir(folder).with_context(|| format!("no {}", folder.display()))?;
    for entry in entries {
        fs::set_permissions(entry?.path(), fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}
