//! Shell: toolchain of the eBPF programs: a compiler that can build `core`, and `bpf-linker` with the same LLVM.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};

use crate::sh;

/// Version of bpf-linker. 0.13 supports LLVM 21 to 23.
const LINKER_VERSION: &str = "0.13.0";
/// Oldest stable compiler that accepts the code with `RUSTC_BOOTSTRAP=1`.
const OLDEST_STABLE: (u32, u32) = (1, 95);

/// Compiler and linker, ready to use.
#[derive(Debug)]
pub(crate) struct EbpfToolchain {
    compiler: EbpfCompiler,
    linker: PathBuf,
}

#[derive(Debug)]
enum EbpfCompiler {
    /// A nightly compiler of rustup's.
    Nightly { rustup: PathBuf },
    /// The system's stable compiler, with unstable flags enabled, and the directory of the library's sources.
    System { rustc: PathBuf, cargo: PathBuf, library: PathBuf },
}

impl EbpfToolchain {
    /// Finds compiler and linker. Builds a missing linker into the user's cache, which takes minutes once.
    pub(crate) fn find() -> Result<Self> {
        let (compiler, llvm) = find_compiler()?;
        let linker = match sh::which("bpf-linker").filter(|path| is_our_linker(path)) {
            Some(path) => path,
            None => cached_linker(llvm)?,
        };
        Ok(Self { compiler, linker })
    }

    /// Command `cargo` of this toolchain, to build eBPF programs.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = match &self.compiler {
            EbpfCompiler::Nightly { rustup } => {
                let mut command = Command::new(rustup);
                command.args(["run", "nightly", "cargo"]).env_remove("RUSTC");
                command
            }
            EbpfCompiler::System { rustc, cargo, library } => {
                let mut command = Command::new(cargo);
                command
                    .env("RUSTC", rustc)
                    .env("RUSTC_BOOTSTRAP", "1")
                    // Debian installs the sources outside of the compiler's own directory.
                    .env("__CARGO_TESTS_ONLY_SRC_ROOT", library);
                command
            }
        };
        // The calling cargo and rustup have set these; they name the stable toolchain.
        for name in ["CARGO", "RUSTUP_TOOLCHAIN", "RUSTFLAGS", "RUSTDOC"] {
            command.env_remove(name);
        }
        command
    }

    /// Path of the linker's executable.
    pub(crate) fn linker(&self) -> &Path {
        &self.linker
    }
}

/// Missing prerequisite of [`EbpfToolchain::find`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MissingTool {
    /// A compiler with the sources of `core`.
    Compiler,
    /// LLVM of this major version, to build the linker with.
    Llvm(u32),
}

/// First missing prerequisite of [`EbpfToolchain::find`]; `None` if it would succeed, or can build the linker itself.
pub(crate) fn missing_tool() -> Option<MissingTool> {
    let Ok((_, llvm)) = find_compiler() else { return Some(MissingTool::Compiler) };
    let on_path = sh::which("bpf-linker").filter(|path| is_our_linker(path));
    let cached = || Some(linker_folder(llvm).ok()?.join("bin/bpf-linker"));
    let has_linker = on_path.or_else(|| cached().filter(|path| is_our_linker(path))).is_some();
    let has_llvm = Path::new(&format!("/usr/lib/llvm-{llvm}/bin/llvm-config")).exists();
    (!has_linker && !has_llvm).then_some(MissingTool::Llvm(llvm))
}

/// Finds a compiler that can build `core`, and the major version of its LLVM.
fn find_compiler() -> Result<(EbpfCompiler, u32)> {
    // The system's first: its packages include the LLVM that the linker needs, while nightly may be ahead of them.
    if let Some(compiler) = find_system().or_else(find_nightly) {
        return Ok(compiler);
    }
    if sh::which("rustup").is_some() {
        bail!(
            "the eBPF programs need a nightly compiler with sources: run \
             `rustup toolchain install nightly --profile minimal --component rust-src`"
        );
    }
    bail!(
        "the eBPF programs need a compiler with sources: install rustup (https://rustup.rs), or on Debian run \
         `apt-get install rustc-web cargo-web rust-web-src`"
    )
}

fn find_nightly() -> Option<(EbpfCompiler, u32)> {
    let rustup = sh::which("rustup")?;
    let rustc =
        |argument: &str| output(Command::new(&rustup).args(["run", "nightly", "rustc", argument]));
    let sysroot =
        output(Command::new(&rustup).args(["run", "nightly", "rustc", "--print", "sysroot"]))?;
    has_sources(&Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library")).then_some(())?;
    let version = rustc("-vV")?;
    Some((EbpfCompiler::Nightly { rustup }, llvm_major(&version)?))
}

fn find_system() -> Option<(EbpfCompiler, u32)> {
    let (rustc, cargo) = (PathBuf::from("/usr/bin/rustc"), PathBuf::from("/usr/bin/cargo"));
    if !rustc.exists() || !cargo.exists() {
        return None;
    }
    let version = output(Command::new(&rustc).arg("-vV"))?;
    let release = field(&version, "release: ")?;
    if !is_recent(release) {
        return None;
    }
    // The library's sources are part of rustup's component, or in a package of their own on Debian.
    let sysroot = output(Command::new(&rustc).args(["--print", "sysroot"]))?;
    let folders = [
        Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library"),
        PathBuf::from(format!("/usr/src/rustc-{release}/library")),
    ];
    let library = folders.into_iter().find(|folder| has_sources(folder))?;
    Some((EbpfCompiler::System { rustc, cargo, library }, llvm_major(&version)?))
}

fn has_sources(library: &Path) -> bool {
    library.join("core/src/lib.rs").exists()
}

/// Returns true if a stable compiler of this release accepts the eBPF programs.
pub(crate) fn is_recent(release: &str) -> bool {
    let mut numbers = release.split(['.', '-']).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= OLDEST_STABLE,
        _ => false,
    }
}

fn llvm_major(version: &str) -> Option<u32> {
    field(version, "LLVM version: ")?.split('.').next()?.parse().ok()
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// Output of a program; `None` if it cannot run or fails.
fn output(command: &mut Command) -> Option<String> {
    let output = command.env_remove("RUSTUP_TOOLCHAIN").stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn is_our_linker(path: &Path) -> bool {
    output(Command::new(path).arg("--version")).is_some_and(|text| text.contains(LINKER_VERSION))
}

fn linker_folder(llvm: u32) -> Result<PathBuf> {
    Ok(cache_directory()?
        .join(format!("bpf-linker-{LINKER_VERSION}-llvm{llvm}-{}", env::consts::ARCH)))
}

/// Path of the linker in the cache, built if missing. Its directory's name has all inputs of the build.
fn cached_linker(llvm: u32) -> Result<PathBuf> {
    let folder = linker_folder(llvm)?;
    let linker = folder.join("bin/bpf-linker");
    if is_our_linker(&linker) {
        return Ok(linker);
    }
    let prefix = PathBuf::from(format!("/usr/lib/llvm-{llvm}"));
    if !prefix.join("bin/llvm-config").exists() {
        bail!(
            "bpf-linker {LINKER_VERSION} is missing, and LLVM {llvm} to build it with: run \
             `apt-get install llvm-{llvm}-dev`, or put bpf-linker {LINKER_VERSION} for LLVM {llvm} on the PATH"
        );
    }
    println!(
        "building bpf-linker {LINKER_VERSION} for LLVM {llvm} into {} (once)",
        folder.display()
    );
    // Built aside and renamed: an interrupted build must not look complete.
    let temporary = folder.with_extension(format!("new-{}", std::process::id()));
    let feature = format!("llvm-{llvm}");
    let built = sh::run(
        sh::cargo()
            .args(["install", "bpf-linker", "--locked", "--no-default-features"])
            .args(["--version", LINKER_VERSION, "--features", &feature, "--root"])
            .arg(&temporary)
            .env_remove("CARGO_TARGET_DIR")
            .env("LLVM_PREFIX", &prefix),
    );
    let moved = built.and_then(|()| {
        let _absent_or_broken = fs::remove_dir_all(&folder);
        fs::rename(&temporary, &folder).with_context(|| format!("cannot make {}", folder.display()))
    });
    if moved.is_err() {
        let _absent = fs::remove_dir_all(&temporary);
    }
    moved.map(|()| linker)
}

/// Directory of Rouse in the user's cache: outside of the repository, so that all checkouts share it.
pub(crate) fn cache_directory() -> Result<PathBuf> {
    let home = || env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = cache.or_else(home).context("neither XDG_CACHE_HOME nor HOME is set: set one")?;
    let folder = cache.join("rouse");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_text_of_the_compiler_names_its_llvm() {
        let text = "rustc 1.97.0-nightly\nrelease: 1.97.0-nightly\nLLVM version: 22.1.4\n";
        assert_eq!(llvm_major(text), Some(22));
        assert_eq!(field(text, "release: "), Some("1.97.0-nightly"));
    }

    #[test]
    fn an_old_compiler_is_not_used() {
        assert!(is_recent("1.96.0") && is_recent("1.95.0-nightly") && is_recent("2.0.0"));
        assert!(!is_recent("1.94.9") && !is_recent("odd"));
    }
}
