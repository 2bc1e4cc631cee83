//! Shell: builds of static programs, written as container images.

pub(crate) mod oci_layout;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use self::oci_layout::ProgramImage;
use crate::{build_ebpf, lock, sh, workspace::CargoWorkspace};

/// Packages that become images: name of package and program, and name of the image.
const IMAGES: [(&str, &str); 2] =
    [("hello", "dev.local/hello:v1"), (ROUSE, "dev.local/rouse:v0.1.0")];
/// Package with all components and the embedded eBPF programs.
const ROUSE: &str = "rouse";
/// Variable that names a built program for the image of Rouse, in place of the static and optimized one. Tests put the
/// program that they have built into the image: building the shipped one takes a quarter of a test run.
pub(crate) const PROGRAM_VARIABLE: &str = "ROUSE_IMAGE_PROGRAM";

/// Names of the packages that become images, each with the image's name.
pub(crate) fn image_names() -> impl Iterator<Item = (&'static str, &'static str)> {
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
    let packages: Vec<&str> = match args.packages.is_empty() {
        true => IMAGES.iter().map(|(package, _)| *package).collect(),
        false => args.packages.iter().map(String::as_str).collect(),
    };
    let to = args.to.clone().unwrap_or_else(|| workspace.target.join("images"));
    write_layouts(&workspace, &packages, &to)
}

/// Builds `packages` and writes each as the OCI layout `to/PACKAGE`.
pub(crate) fn write_layouts(
    workspace: &CargoWorkspace,
    packages: &[&str],
    to: &Path,
) -> Result<()> {
    // Tests and clusters may build the same images at the same time.
    let _lock = lock::acquire(&to.with_extension("lock"))?;
    for package in packages {
        let Some((_, name)) = IMAGES.iter().find(|(name, _)| name == package) else {
            let names: Vec<&str> = IMAGES.iter().map(|(package, _)| *package).collect();
            bail!("no image is made of `{package}`; there are {}", names.join(", "));
        };
        let folder = to.join(package);
        let digest = match prebuilt_program(package) {
            Some(program) => write_dynamic(name, package, &program, &folder),
            None => write_static(workspace, name, package, &folder),
        };
        let digest =
            digest.with_context(|| format!("cannot write the image {}", folder.display()))?;
        println!("image {name}: {} ({digest})", folder.display());
    }
    Ok(())
}

/// Program that the environment names for the image of `package`.
fn prebuilt_program(package: &str) -> Option<PathBuf> {
    let program = std::env::var_os(PROGRAM_VARIABLE).filter(|it| !it.is_empty())?;
    (package == ROUSE).then(|| program.into())
}

/// Builds `package`, and writes the image that users get to `folder`. Returns the manifest's digest.
fn write_static(
    workspace: &CargoWorkspace,
    name: &str,
    package: &str,
    folder: &Path,
) -> Result<String> {
    let program = build_static(workspace, package)?;
    let bytes = fs::read(&program).with_context(|| format!("cannot read {}", program.display()))?;
    let image = ProgramImage { name, program: package, bytes: &bytes, libraries: &[] };
    let digest = oci_layout::write(&image, folder)?;
    // A copy on a short path, for users.
    let short = workspace.target.join("bin");
    fs::create_dir_all(&short)
        .and_then(|()| fs::copy(&program, short.join(package)))
        .with_context(|| format!("cannot copy {} to {}", program.display(), short.display()))?;
    Ok(digest)
}

/// Writes an image of `program`, without its symbols and with the shared libraries that the dynamic linker finds here.
fn write_dynamic(name: &str, program_name: &str, program: &Path, folder: &Path) -> Result<String> {
    fs::create_dir_all(folder)?;
    let stripped = folder.with_extension("stripped");
    sh::run(Command::new("strip").arg("-o").arg(&stripped).arg(program))?;
    let bytes = fs::read(&stripped)?;
    fs::remove_file(&stripped)?;
    // The image has nothing else in it, so each library must be there under the same path.
    let listed = sh::capture(Command::new("ldd").arg(program))?;
    let libraries = listed.lines().filter_map(library).map(|path| {
        let bytes = fs::read(path).with_context(|| format!("cannot read {path}"))?;
        Ok((path.trim_start_matches('/').to_owned(), bytes))
    });
    let libraries: Vec<_> = libraries.collect::<Result<_>>()?;
    oci_layout::write(
        &ProgramImage { name, program: program_name, bytes: &bytes, libraries: &libraries },
        folder,
    )
}

/// Path in a line of `ldd`: `libm.so.6 => /lib/libm.so.6 (0x7f…)`, or the linker itself: `/lib64/ld-linux.so.2
/// (0x7f…)`.
fn library(line: &str) -> Option<&str> {
    line.split_whitespace().find(|word| word.starts_with('/'))
}

/// Builds one package as a static program and returns its path.
pub(crate) fn build_static(workspace: &CargoWorkspace, package: &str) -> Result<PathBuf> {
    let triple = target_triple();
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
        cargo.env(build_ebpf::OBJECT_VARIABLE, build_ebpf::build_object(workspace)?);
    }
    sh::run(&mut cargo)?;
    Ok(program_path(workspace, package))
}

/// Path of the static program of `package`.
pub(crate) fn program_path(workspace: &CargoWorkspace, package: &str) -> PathBuf {
    workspace.target.join(target_triple()).join("image").join(package)
}

fn target_triple() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_from_ldd() {
        let listed = "\tlinux-vdso.so.1 (0x00007f18)\n\tlibm.so.6 => /lib/libm.so.6 (0x00007f18)\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x00007f18)\n";
        let libraries: Vec<&str> = listed.lines().filter_map(library).collect();
        assert_eq!(libraries, ["/lib/libm.so.6", "/lib64/ld-linux-x86-64.so.2"]);
    }
}
