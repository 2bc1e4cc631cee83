//! Shell: builds of the servers and clients of the kernel and local tiers that no package has, once into the user's
//! cache.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use crate::{cluster::go_toolchain::GoToolchain, sh, toolchain, workspace::CargoWorkspace};

/// Directory of their sources, from the root of the repository.
const SOURCES: &str = "tests/servers";
/// Source files. The Go module fixes the versions of all dependencies.
const FILES: [&str; 12] = [
    "App.java",
    "resolve.c",
    "go/go.mod",
    "go/go.sum",
    "go/main.go",
    "go/http.go",
    "go/https.go",
    "go/grpc.go",
    "go/pools.go",
    "go/requests.go",
    "go/resolver.go",
    "go/websockets.go",
];
/// Packages of third-party clients, pinned by the same Go module.
const GRPCURL: &str = "github.com/fullstorydev/grpcurl/cmd/grpcurl";
const H2SPEC: &str = "github.com/summerwind/h2spec/cmd/h2spec";
/// Directory of Debian's Java libraries, and the libraries that the server needs.
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
/// Flags of all builds, and a number to raise with any other change of the build. Part of the cache directory's name.
const BUILD_PROCEDURE: &str = "CGO_ENABLED=0 -trimpath, --release 11, -static -O2 2";

/// Runs `cargo xtask servers`: builds them and prints the variable for the tests.
pub(crate) fn run() -> Result<()> {
    let folder = build(&CargoWorkspace::load()?)?;
    println!("ROUSE_SERVERS={}", folder.display());
    Ok(())
}

/// Builds the servers if they are missing, and links `servers` in the target directory to them. Returns their
/// directory.
pub(crate) fn build(workspace: &CargoWorkspace) -> Result<PathBuf> {
    let sources = workspace.root.join(SOURCES);
    let folder = toolchain::cache_directory()?.join(format!("servers-{}", digest(&sources)?));
    if !folder.exists() {
        println!("building servers in Go, Java and C into {} (once)", folder.display());
        build_all(&sources, &folder)?;
    }
    // A stable path for users who run the test program by hand.
    let link = workspace.target.join("servers");
    let _absent = fs::remove_file(&link);
    std::os::unix::fs::symlink(&folder, &link)
        .with_context(|| format!("cannot make {}", link.display()))?;
    Ok(folder)
}

/// Removes the table of an earlier run of `tests/kernel/servers.rs`.
pub(crate) fn remove_results(workspace: &CargoWorkspace) {
    let _absent = fs::remove_file(results_path(workspace));
}

/// Prints the table of `tests/kernel/servers.rs`, if these tests ran.
pub(crate) fn print_results(workspace: &CargoWorkspace) {
    if let Ok(text) = fs::read_to_string(results_path(workspace)) {
        println!("\n{text}");
    }
}

/// Path of the table that `tests/kernel/servers.rs` writes.
fn results_path(workspace: &CargoWorkspace) -> PathBuf {
    workspace.target.join("servers.md")
}

/// Digest of the sources and of the libraries that Java's classes are compiled with, for the directory's name. Versions
/// of Go and javac are not part of it: servers of an earlier compiler stay valid.
fn digest(sources: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    hash.update(format!("{BUILD_PROCEDURE} {}\n", std::env::consts::ARCH));
    for file in FILES {
        let text = fs::read(sources.join(file)).with_context(|| format!("no {SOURCES}/{file}"))?;
        // With the length, so that no text can pass for the next file's.
        hash.update(format!("{file} {}\n", text.len()));
        hash.update(text);
    }
    for jar in jetty_jars()? {
        let bytes = fs::read(&jar).with_context(|| format!("cannot read {}", jar.display()))?;
        hash.update(format!("{} {}\n", jar.display(), bytes.len()));
        hash.update(bytes);
    }
    let bytes = hash.finalize();
    Ok(bytes.iter().take(8).map(|byte| format!("{byte:02x}")).collect())
}

/// Builds all servers aside and renames the directory: an interrupted build must not look complete.
fn build_all(sources: &Path, folder: &Path) -> Result<()> {
    let temporary = folder.with_extension(format!("new-{}", std::process::id()));
    fs::create_dir_all(&temporary)
        .with_context(|| format!("cannot make {}", temporary.display()))?;
    let built = build_go(sources, &temporary)
        .and_then(|()| build_java(sources, &temporary.join("java")))
        .and_then(|()| build_musl_resolver(sources, &temporary.join("resolve-musl")))
        .and_then(|()| {
            fs::rename(&temporary, folder)
                .with_context(|| format!("cannot make {}", folder.display()))
        });
    if built.is_err() {
        let _absent = fs::remove_dir_all(&temporary);
    }
    built
}

fn build_go(sources: &Path, into: &Path) -> Result<()> {
    let toolchain = GoToolchain::find()?;
    // All programs in one call, with exactly the versions in go.mod and go.sum.
    let into = format!("{}/", into.display());
    let args = ["build", "-mod=readonly", "-trimpath", "-o", &into, ".", GRPCURL, H2SPEC];
    sh::run(&mut toolchain.command(&sources.join("go"), &args.map(str::to_owned)))
}

/// Builds the client of musl's resolver. It is static: the machine's own C library has another resolver.
fn build_musl_resolver(sources: &Path, program: &Path) -> Result<()> {
    let mut compiler = Command::new("musl-gcc");
    compiler.args(["-static", "-O2", "-o"]).arg(program).arg(sources.join("resolve.c"));
    sh::run(&mut compiler)
}

/// Returns the paths of the libraries that the server in Java needs, at compilation and when it runs.
fn jetty_jars() -> Result<Vec<PathBuf>> {
    let jars: Vec<PathBuf> =
        JETTY.iter().map(|name| Path::new(JARS).join(format!("{name}.jar"))).collect();
    if let Some(jar) = jars.iter().find(|jar| !jar.exists()) {
        bail!("{} is missing: run `apt-get install libjetty9-java`", jar.display());
    }
    Ok(jars)
}

fn build_java(sources: &Path, into: &Path) -> Result<()> {
    let jars = jetty_jars()?;
    let path: Vec<String> = jars.iter().map(|jar| jar.display().to_string()).collect();
    let path = path.join(":");
    let mut javac = Command::new("javac");
    // The oldest Java among the systems that the tests run on.
    javac.args(["--release", "11", "-cp", &path, "-d"]).arg(into).arg(sources.join("App.java"));
    sh::run(&mut javac)?;
    // The classes run with the same libraries that they were compiled with.
    fs::write(into.join("jars"), path).context("cannot write to the cache")
}
