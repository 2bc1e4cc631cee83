//! Shell: builds of static programs, written as container images.

pub(crate) mod layout;

use std::{fs, path::Path, path::PathBuf};

use anyhow::{Context as _, Result, bail};

use self::layout::ProgramImage;
use crate::{build_ebpf, lock, sh, workspace::CargoWorkspace};

/// Packages that become images: name of package and program, and name of the image.
const IMAGES: [(&str, &str); 2] =
    [("hello", "dev.local/hello:v1"), (ROUSE, "dev.local/rouse:v0.1.0")];
/// Package with all components and the embedded eBPF programs.
const ROUSE: &str = "rouse";

/// Names of the packages that become images, each with the image's name.
pub(crate) fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    IMAGES.into_iter()
}

/// Images to build, and their destination.
#[derive(Debug, clap::Args)]
pub(crate) struct ImageArgs {
    /// Packages to make images of; all when none is named
    packages: Vec<String>,
    /// Directory that receives one OCI layout an image [default: images in cargo's target directory]
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
}

/// Runs `cargo xtask image`: builds the named images, or all.
pub(crate) fn run(args: &ImageArgs) -> Result<()> {
    let workspace = CargoWorkspace::load()?;
    let wanted: Vec<&str> = match args.packages.is_empty() {
        true => IMAGES.iter().map(|(package, _)| *package).collect(),
        false => args.packages.iter().map(String::as_str).collect(),
    };
    let to = args.to.clone().unwrap_or_else(|| workspace.target.join("images"));
    make(&workspace, &wanted, &to)
}

/// Builds `packages` and writes each as the OCI layout `to/PACKAGE`.
pub(crate) fn make(workspace: &CargoWorkspace, packages: &[&str], to: &Path) -> Result<()> {
    // Tests and clusters may build the same images at the same time.
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
        let image = ProgramImage { name, program: package, bytes: &bytes };
        let digest = layout::write(&image, &folder)
            .with_context(|| format!("cannot write the image {}", folder.display()))?;
        // A copy on a short path, for users.
        let short = workspace.target.join("bin");
        fs::create_dir_all(&short)
            .and_then(|()| fs::copy(&program, short.join(package)))
            .with_context(|| format!("cannot copy {} to {}", program.display(), short.display()))?;
        println!("image {name}: {} ({digest})", folder.display());
    }
    Ok(())
}

/// Builds one package as a static program and returns its path.
pub(crate) fn build(workspace: &CargoWorkspace, package: &str) -> Result<PathBuf> {
    let triple = triple();
    // Static, so that the image needs only this file. Without paths of the machine, so that two checkouts give the
    // same bytes. The variable names the target, so that build scripts are compiled as usual.
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
        // 64 KiB, the largest page size: the allocator refuses to start on pages larger than it was built for.
        cargo.env("JEMALLOC_SYS_WITH_LG_PAGE", "16");
    }
    if package == ROUSE {
        cargo.env(build_ebpf::VARIABLE, build_ebpf::object(workspace)?);
    }
    sh::run(&mut cargo)?;
    Ok(program(workspace, package))
}

/// Path of the static program of `package`.
pub(crate) fn program(workspace: &CargoWorkspace, package: &str) -> PathBuf {
    workspace.target.join(triple()).join("image").join(package)
}

fn triple() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}
