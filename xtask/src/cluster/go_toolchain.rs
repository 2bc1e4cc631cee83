//! Shell: the Go toolchain that builds the cluster's programs: the machine's own, or one fetched as a module.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};

use super::versions::{GO, GoVersion};
use crate::{sh, toolchain};

/// A `go` command of a sufficient version.
#[derive(Debug)]
pub(crate) struct GoToolchain {
    go: PathBuf,
    /// Build cache of its own, so that it can be deleted after a build.
    cache: PathBuf,
}

impl GoToolchain {
    /// Finds Go on the `PATH` or in `/usr/local/go`; if that is too old, it downloads the right version.
    pub(crate) fn find() -> Result<Self> {
        let cache = toolchain::cache_directory()?.join("go-build");
        let mut any = None;
        // The first one that is new enough is used; an old one can at least download another.
        for program in candidates() {
            match version(&program) {
                Some(go_version) if go_version.is_sufficient() => {
                    return Ok(Self { go: program, cache });
                }
                Some(_) => any = any.or(Some(program)),
                None => {}
            }
        }
        let Some(old) = any else {
            bail!("Go is missing: install it (on Debian `apt-get install golang-go`)");
        };
        Ok(Self { go: download(&old)?, cache })
    }

    /// Command `go ARGS` in `folder`, with low priority because the machine is shared.
    pub(crate) fn command(&self, folder: &Path, args: &[String]) -> Command {
        let mut command = Command::new("nice");
        command.args(["-n", "5"]).arg(&self.go).args(args).current_dir(folder);
        command.env("GOCACHE", &self.cache);
        set_environment(&mut command);
        command
    }

    /// Deletes the build cache: gigabytes that only another build of the same version would use.
    pub(crate) fn delete_build_cache(&self) {
        let _absent = fs::remove_dir_all(&self.cache);
    }
}

fn set_environment(command: &mut Command) {
    // Without cgo the programs are static and run in any image.
    command.env("CGO_ENABLED", "0").env("GOFLAGS", "-mod=mod").env("GOTOOLCHAIN", "local");
    command.env("GOWORK", "off");
}

fn candidates() -> Vec<PathBuf> {
    let local = PathBuf::from("/usr/local/go/bin/go");
    sh::which("go").into_iter().chain(local.exists().then_some(local)).collect()
}

fn version(program: &Path) -> Option<GoVersion> {
    let mut command = Command::new(program);
    command.arg("version").stderr(Stdio::null());
    set_environment(&mut command);
    GoVersion::parse(&String::from_utf8_lossy(&command.output().ok()?.stdout))
}

/// Downloads Go itself through the module proxy, as `go` does since 1.21; an older `go` can also download it.
fn download(old: &Path) -> Result<PathBuf> {
    let folder = toolchain::cache_directory()?.join(GO.to_string());
    let program = folder.join("bin/go");
    if version(&program).is_some() {
        return Ok(program);
    }
    println!("fetching {GO}, because {} is too old", old.display());
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    // To `go mod download` a toolchain is a module like any other, so an old `go` can fetch it.
    let module = format!("golang.org/toolchain@v0.0.1-{GO}.linux-{arch}");
    let mut command = Command::new(old);
    command.args(["mod", "download", "-json", &module]).current_dir(std::env::temp_dir());
    set_environment(&mut command);
    let response: serde_json::Value = serde_json::from_str(&sh::capture(&mut command)?)?;
    let from =
        response["Dir"].as_str().with_context(|| format!("{module} came without a folder"))?;
    // The module cache is read-only and drops the execute bits.
    let temporary = folder.with_extension("new");
    let _absent = fs::remove_dir_all(&temporary);
    sh::run(Command::new("cp").args(["-r", "--no-preserve=mode", from]).arg(&temporary))?;
    for folder in ["bin", &format!("pkg/tool/linux_{arch}")] {
        make_executable(&temporary.join(folder))?;
    }
    // Moved into place when complete: an interrupted copy must not look like a usable Go.
    let _absent = fs::remove_dir_all(&folder);
    fs::rename(&temporary, &folder).with_context(|| format!("cannot make {}", folder.display()))?;
    match version(&program) {
        Some(_) => Ok(program),
        None => bail!("the Go fetched to {} does not run", folder.display()),
    }
}

fn make_executable(folder: &Path) -> Result<()> {
    let entries = fs::read_dir(folder).with_context(|| format!("no {}", folder.display()))?;
    for entry in entries {
        fs::set_permissions(entry?.path(), fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}
