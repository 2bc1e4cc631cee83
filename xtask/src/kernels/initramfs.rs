//! Shell: initramfs of a virtual machine: a shell, the modules that mount the host's files, and the job.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use super::{cpio::CpioArchive, debian::CachedKernel, modules};

/// Script of the first process.
const INIT: &str = include_str!("init.sh");
/// Kernel modules that mount the host's files. All other modules are loaded from these files on demand.
const MODULES: [&str; 4] = ["virtio_pci", "9pnet_virtio", "9p", "overlay"];
/// Directories that the init script needs, mostly as mount points.
const DIRECTORIES: [&str; 9] =
    ["bin", "dev", "host", "layer", "modules", "proc", "root", "sys", "dev/pts"];
/// Path of the shell, which must be a static program.
const BUSYBOX: &str = "/bin/busybox";

/// Builds the initramfs for a kernel. The job is a script that runs the tests of `program`.
pub(crate) fn build(kernel: &CachedKernel, program: &Path, job: &str) -> Result<Vec<u8>> {
    let mut archive = CpioArchive::default();
    DIRECTORIES.iter().for_each(|folder| archive.add_directory(folder));
    archive.add_file("bin/busybox", &busybox()?);
    for (number, file) in boot_modules(kernel)?.iter().enumerate() {
        let name = file.rsplit('/').next().unwrap_or_default();
        // Numbered, because the init script loads them in the order of their names.
        let path = format!("modules/{number:02}-{}", name.split(".xz").next().unwrap_or_default());
        archive.add_file(&path, &read_module(&kernel.modules.join(file))?);
    }
    archive.add_file("settings", init_settings(kernel, program)?.as_bytes());
    archive.add_file("job", job.as_bytes());
    archive.add_file("init", INIT.as_bytes());
    Ok(archive.finish())
}

fn busybox() -> Result<Vec<u8>> {
    let bytes = read(Path::new(BUSYBOX))?;
    if has_interpreter(&bytes) {
        bail!("{BUSYBOX} needs libraries: install the package busybox-static in place of busybox");
    }
    Ok(bytes)
}

/// Returns true if an ELF program (64 bits, little-endian) needs a dynamic loader.
fn has_interpreter(program: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    let read_integer = |offset: usize, length: usize| {
        let field = program.get(offset..offset + length).unwrap_or_default();
        field.iter().rev().fold(0, |sum: usize, &byte| sum << 8 | usize::from(byte))
    };
    // Offset of the program headers, size of one header, and their number.
    let (start, size, count) = (read_integer(32, 8), read_integer(54, 2), read_integer(56, 2));
    (0..count).any(|index| read_integer(start + index * size, 4) as u32 == PT_INTERP)
}

fn boot_modules(kernel: &CachedKernel) -> Result<Vec<String>> {
    let list = |name: &str| -> Result<String> {
        Ok(String::from_utf8_lossy(&read(&kernel.modules.join(name))?).into_owned())
    };
    modules::resolve(&list("modules.dep")?, &list("modules.builtin")?, &MODULES)
        .map_err(|error| anyhow::anyhow!("Linux {} cannot start here: {error}", kernel.release))
}

fn read_module(file: &Path) -> Result<Vec<u8>> {
    if !modules::is_compressed(&file.to_string_lossy()) {
        return read(file);
    }
    let unpacked = Command::new(BUSYBOX).arg("xzcat").arg(file).output();
    let unpacked = unpacked.with_context(|| format!("cannot start {BUSYBOX}"))?;
    if !unpacked.status.success() {
        bail!("cannot unpack {}", file.display());
    }
    Ok(unpacked.stdout)
}

fn init_settings(kernel: &CachedKernel, program: &Path) -> Result<String> {
    let folder = |path: &Path| -> Result<PathBuf> {
        fs::canonicalize(path).with_context(|| format!("cannot find {}", path.display()))
    };
    let modules = folder(&kernel.modules)?;
    let program = folder(program)?;
    Ok(format!(
        "RELEASE={}\nMODULES={}\nPROGRAM={}\n",
        shell_quote(&kernel.release),
        shell_quote(&modules.to_string_lossy()),
        shell_quote(&program.to_string_lossy())
    ))
}

/// Quotes a text as one word of a shell.
pub(crate) fn shell_quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn read(file: &Path) -> Result<Vec<u8>> {
    fs::read(file).with_context(|| format!("cannot read {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_libraries_names_an_interpreter() {
        let test = read(&std::env::current_exe().expect("it runs")).expect("it can be read");
        assert!(has_interpreter(&test));
        assert!(!has_interpreter(b"#!/bin/sh\n") && !has_interpreter(&[]));
    }

    #[test]
    fn a_quoted_word_stays_one_word() {
        assert_eq!(shell_quote("a b"), "'a b'");
        assert_eq!(shell_quote("it's"), r"'it'\''s'");
    }
}
