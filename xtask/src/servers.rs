//! Shell: builds the servers and clients of the kernel tier's table that are no packages, once into the user's cache.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use crate::{cluster::golang::Golang, sh, toolchain, workspace::Workspace};

/// Their sources, below the checkout.
const SOURCES: &str = "tests/servers";
/// What is built from them. The Go module names the versions of all that goes in.
const FILES: [&str; 8] = [
    "App.java",
    "go/go.mod",
    "go/go.sum",
    "go/main.go",
    "go/http.go",
    "go/grpc.go",
    "go/requests.go",
    "go/websockets.go",
];
/// A client of other people's, in the same module.
const GRPCURL: &str = "github.com/fullstorydev/grpcurl/cmd/grpcurl";
/// Where Debian's Java libraries are, and those that the server needs.
const JARS: &str = "/usr/share/java";
const JETTY: [&str; 8] = [
    "jetty9-server",
    "jetty9-http",
    "jetty9-io",
    "jetty9-util",
    "jetty9-http2-server",
    "jetty9-http2-common",
    "jetty9-http2-hpack",
    "servlet-api",
];
/// Changes when the way of building does, so that the cache holds no mixture.
const WAY: &str = "CGO_ENABLED=0 -trimpath, --release 11 1";

/// `cargo xtask servers`.
pub(crate) fn run() -> Result<()> {
    let folder = make(&Workspace::load()?)?;
    println!("ROUSE_SERVERS={}", folder.display());
    Ok(())
}

/// Builds what is missing, and lets `servers` in the target folder lead there. Returns where it is.
pub(crate) fn make(workspace: &Workspace) -> Result<PathBuf> {
    let sources = workspace.root.join(SOURCES);
    let folder = toolchain::cache()?.join(format!("servers-{}", digest(&sources)?));
    if !folder.exists() {
        println!("building servers in Go and Java into {} (once)", folder.display());
        build_whole(&sources, &folder)?;
    }
    let link = workspace.target.join("servers");
    let _absent = fs::remove_file(&link);
    std::os::unix::fs::symlink(&folder, &link)
        .with_context(|| format!("cannot make {}", link.display()))?;
    Ok(folder)
}

/// Removes the table of an earlier run.
pub(crate) fn forget(workspace: &Workspace) {
    let _absent = fs::remove_file(table(workspace));
}

/// Prints the table that the tests have written, if those ran that do.
pub(crate) fn show(workspace: &Workspace) {
    if let Ok(text) = fs::read_to_string(table(workspace)) {
        println!("\n{text}");
    }
}

fn table(workspace: &Workspace) -> PathBuf {
    workspace.target.join("servers.md")
}

/// Named after all that makes a difference.
fn digest(sources: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    hash.update(format!("{WAY} {}\n", std::env::consts::ARCH));
    for file in FILES {
        let text = fs::read(sources.join(file)).with_context(|| format!("no {SOURCES}/{file}"))?;
        hash.update(format!("{file} {}\n", text.len()));
        hash.update(text);
    }
    let bytes = hash.finalize();
    Ok(bytes.iter().take(8).map(|byte| format!("{byte:02x}")).collect())
}

/// Built aside and moved, so that an interrupted build leaves nothing that looks whole.
fn build_whole(sources: &Path, folder: &Path) -> Result<()> {
    let aside = folder.with_extension(format!("new-{}", std::process::id()));
    fs::create_dir_all(&aside).with_context(|| format!("cannot make {}", aside.display()))?;
    let built = build_go(sources, &aside)
        .and_then(|()| build_java(sources, &aside.join("java")))
        .and_then(|()| {
            fs::rename(&aside, folder).with_context(|| format!("cannot make {}", folder.display()))
        });
    if built.is_err() {
        let _absent = fs::remove_dir_all(&aside);
    }
    built
}

fn build_go(sources: &Path, into: &Path) -> Result<()> {
    let go = Golang::find()?;
    // Both at once, with what go.mod and go.sum say and nothing else.
    let into = format!("{}/", into.display());
    let args = ["build", "-mod=readonly", "-trimpath", "-o", &into, ".", GRPCURL];
    sh::run(&mut go.command(&sources.join("go"), &args.map(str::to_owned)))
}

fn build_java(sources: &Path, into: &Path) -> Result<()> {
    let jars: Vec<PathBuf> =
        JETTY.iter().map(|name| Path::new(JARS).join(format!("{name}.jar"))).collect();
    if let Some(jar) = jars.iter().find(|jar| !jar.exists()) {
        bail!("{} is missing: run `apt-get install libjetty9-java`", jar.display());
    }
    let path: Vec<String> = jars.iter().map(|jar| jar.display().to_string()).collect();
    let path = path.join(":");
    let mut javac = Command::new("javac");
    // The oldest Java of the systems that the tests run on.
    javac.args(["--release", "11", "-cp", &path, "-d"]).arg(into).arg(sources.join("App.java"));
    sh::run(&mut javac)?;
    // What the classes were built with they also run with.
    fs::write(into.join("jars"), path).context("cannot write to the cache")
}
