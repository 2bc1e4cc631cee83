//! Shell: builds static programs and writes them as container images.

pub(crate) mod layout;

use std::{fs, path::Path, path::PathBuf};

use anyhow::{Context as _, Result, bail};

use self::layout::Image;
use crate::{build_ebpf, lock, sh, workspace::Workspace};

/// Our programs that become images: package (and program) and the image's name.
const IMAGES: [(&str, &str); 2] =
    [("hello", "dev.local/hello:v1"), (ROUSE, "dev.local/rouse:v0.1.0")];
/// The package with all parts, and with the kernel half in it.
const ROUSE: &str = "rouse";

/// The packages that become images, and the images' names.
pub(crate) fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    IMAGES.into_iter()
}

/// Which images, and where to.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Packages to make images of; all when none is named
    packages: Vec<String>,
    /// Folder that receives one OCI layout an image [default: images in cargo's target folder]
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
}

/// `cargo xtask image`.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    let wanted: Vec<&str> = match args.packages.is_empty() {
        true => IMAGES.iter().map(|(package, _)| *package).collect(),
        false => args.packages.iter().map(String::as_str).collect(),
    };
    let to = args.to.clone().unwrap_or_else(|| workspace.target.join("images"));
    make(&workspace, &wanted, &to)
}

/// Builds `packages` and writes each as the OCI layout `to/PACKAGE`.
pub(crate) fn make(workspace: &Workspace, packages: &[&str], to: &Path) -> Result<()> {
    let _lock = lock::wait_for(&to.with_extension("lock"))?;
    for package in packages {
        let Some((_, name)) = IMAGES.iter().find(|(known, _)| known == package) else {
            let known: Vec<&str> = IMAGES.iter().map(|(package, _)| *package).collect();
            bail!("no image is made of `{package}`; there are {}", known.join(", "));
        };
        let program = build(workspace, package)?;
        let bytes =
            fs::read(&program).with_context(|| format!("cannot read {}", program.display()))?;
        let folder = to.join(package);
        let image = Image { name, program: package, bytes: &bytes };
        let digest = layout::write(&image, &folder)
            .with_context(|| format!("cannot write the image {}", folder.display()))?;
        // For people: the same program by a short path.
        let short = workspace.target.join("bin");
        fs::create_dir_all(&short)
            .and_then(|()| fs::copy(&program, short.join(package)))
            .with_context(|| format!("cannot copy {} to {}", program.display(), short.display()))?;
        println!("image {name}: {} ({digest})", folder.display());
    }
    Ok(())
}

/// Builds one package as a static program and returns its file.
pub(crate) fn build(workspace: &Workspace, package: &str) -> Result<PathBuf> {
    let triple = triple();
    // Static, so that the image needs nothing but this one file; without machine paths, so that two
    // checkouts give the same bytes. Named by target so that build scripts stay as they are.
    let variable = format!("CARGO_TARGET_{}_RUSTFLAGS", triple.to_uppercase().replace('-', "_"));
    let home = std::env::var("CARGO_HOME")
        .or_else(|_| std::env::var("HOME").map(|home| home + "/.cargo"))
        .unwrap_or_default();
    let flags = format!(
        "-C target-feature=+crt-static --remap-path-prefix={}=/rouse --remap-path-prefix={home}=/cargo",
        workspace.root.display()
    );
    let mut cargo = sh::cargo();
    cargo.args(["build", "--quiet", "--profile", "image", "--package", package]);
    cargo.args(["--target", &triple]).env(variable, flags).current_dir(&workspace.root);
    if cfg!(target_arch = "aarch64") {
        // 64 KiB, the largest pages there are: the allocator refuses to start where they are larger than it was built for.
        cargo.env("JEMALLOC_SYS_WITH_LG_PAGE", "16");
    }
    if package == ROUSE {
        cargo.env(build_ebpf::VARIABLE, build_ebpf::object(workspace)?);
    }
    sh::run(&mut cargo)?;
    Ok(program(workspace, package))
}

/// Where the static program of `package` is built.
pub(crate) fn program(workspace: &Workspace, package: &str) -> PathBuf {
    workspace.target.join(triple()).join("image").join(package)
}

fn triple() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}
