//! Shell: downloads of Debian's kernels, by apt with sources and lists of its own, apart from the machine's packages.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

use super::{
    modules,
    packages::{self, DebianPackage},
    supported::SupportedKernel,
};
use crate::{sh, toolchain};

/// Keyring with the keys that Debian signs with.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Package that always depends on a suite's present kernel.
const META_PACKAGE: &str = "linux-image-amd64";
/// Age from which package lists are updated.
const LISTS_MAX_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// A kernel in the cache.
#[derive(Debug)]
pub(crate) struct CachedKernel {
    /// Version of the package, `5.10.262-1`.
    pub(crate) version: String,
    /// Kernel release as `uname -r` prints it, `5.10.0-41-amd64`.
    pub(crate) release: String,
    /// Path of the bootable image.
    pub(crate) image: PathBuf,
    /// Directory of its modules, with the files of `depmod`.
    pub(crate) modules: PathBuf,
}

/// Mirrors that packages are downloaded from.
#[derive(Debug)]
pub(crate) struct DebianMirrors {
    archive: String,
    security: Option<String>,
}

impl DebianMirrors {
    /// Returns `mirror` as the only mirror, or else the mirrors in this machine's apt sources.
    pub(crate) fn find(mirror: Option<&str>) -> Result<Self> {
        if let Some(mirror) = mirror {
            return Ok(Self { archive: mirror.trim_end_matches('/').to_owned(), security: None });
        }
        let mut apt_get = Command::new("apt-get");
        apt_get.args(["indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]);
        let (archive, security) = packages::parse_mirrors(&sh::capture(&mut apt_get)?);
        let archive = archive.context(
            "apt's sources name no mirror of Debian to take kernels from: name one with --mirror",
        )?;
        Ok(Self { archive, security })
    }
}

/// Returns the newest package of a kernel, from the cache or from the mirror.
pub(crate) fn fetch(kernel: &SupportedKernel, mirrors: &DebianMirrors) -> Result<CachedKernel> {
    let cache = toolchain::cache_directory()?.join("kernels");
    let apt = AptInstance { folder: cache.join(format!("apt-{}", kernel.name)) };
    apt.update(kernel, mirrors)?;
    let listed = sh::capture(apt.command("apt-cache").args(["madison", META_PACKAGE]))?;
    let version = packages::highest_version(&listed).with_context(|| {
        format!("Debian's {} have no {META_PACKAGE}", kernel.suites.join(" and "))
    })?;
    let folder = cache.join(&version);
    if !folder.exists() {
        println!("kernels: Debian's Linux {version} goes into {} (once)", folder.display());
        // Filled aside and renamed: an interrupted download must not look complete.
        let temporary = cache.join(format!("new-{}", std::process::id()));
        let filled = download_packages(&apt, &version, &temporary).and_then(|()| {
            fs::rename(&temporary, &folder)
                .with_context(|| format!("cannot make {}", folder.display()))
        });
        if filled.is_err() {
            let _absent = fs::remove_dir_all(&temporary);
        }
        filled?;
    }
    describe_cached(version, &folder)
}

/// Describes the kernel in a directory of the cache.
fn describe_cached(version: String, folder: &Path) -> Result<CachedKernel> {
    let (image, modules) = (folder.join("vmlinuz"), folder.join("lib/modules"));
    let broken = || format!("{} is broken: remove it", folder.display());
    let mut entries = fs::read_dir(&modules).with_context(broken)?.flatten();
    let release = entries.next().with_context(broken)?.file_name().to_string_lossy().into_owned();
    let modules = modules.join(&release);
    Ok(CachedKernel { version, release, image, modules })
}

/// Downloads all packages of a kernel, and leaves in `folder` the files that a machine needs.
fn download_packages(apt: &AptInstance, version: &str, folder: &Path) -> Result<()> {
    let debs = folder.join("debs");
    fs::create_dir_all(&debs).with_context(|| format!("cannot make {}", debs.display()))?;
    let debian_packages = apt.kernel_packages(version)?;
    // Exact versions, because apt would otherwise choose by its own priorities.
    let args = debian_packages.iter().map(|part| format!("{}={}", part.name, part.version));
    sh::capture(apt.command("apt-get").args(["-qq", "download"]).args(args).current_dir(&debs))?;
    for deb in fs::read_dir(&debs)?.flatten() {
        unpack(&deb.path(), folder)
            .with_context(|| format!("cannot unpack {}", deb.path().display()))?;
    }
    fs::remove_dir_all(&debs)?;
    let fetched = describe_cached(version.to_owned(), folder)?;
    if !fetched.image.exists() {
        bail!("no package of Linux {version} holds the kernel itself");
    }
    // The packages run depmod when installed, but here they are only unpacked.
    let depmod = sh::which("depmod").context("depmod is missing (package kmod)")?;
    sh::capture(Command::new(depmod).arg("-b").arg(folder).arg(&fetched.release)).map(drop)
}

/// Extracts the kernel of a package, and its modules, into `folder`.
fn unpack(deb: &Path, folder: &Path) -> Result<()> {
    let mut command = Command::new("dpkg-deb");
    let mut child = command.arg("--fsys-tarfile").arg(deb).stdout(Stdio::piped()).spawn()?;
    let mut archive = tar::Archive::new(child.stdout.take().context("its output was piped")?);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.to_string_lossy().into_owned();
        // Newer packages have all files below usr.
        let path = path.trim_start_matches("./").trim_start_matches("usr/");
        let to = match cache_path(path) {
            Some(to) if entry.header().entry_type().is_file() => folder.join(to),
            _ => continue,
        };
        fs::create_dir_all(to.parent().context("every file is in a folder")?)?;
        io::copy(&mut entry, &mut fs::File::create(to)?)?;
    }
    // tar may stop before the final padding, and dpkg-deb would fail on a closed pipe.
    io::copy(&mut archive.into_inner(), &mut io::sink())?;
    if !child.wait()?.success() {
        bail!("dpkg-deb failed");
    }
    Ok(())
}

/// Path of a package's file in the cache; `None` if it is not needed.
fn cache_path(path: &str) -> Option<PathBuf> {
    if path.starts_with("boot/vmlinuz-") {
        return Some("vmlinuz".into());
    }
    let (release, file) = path.strip_prefix("lib/modules/")?.split_once('/')?;
    match file {
        "vmlinuz" => Some("vmlinuz".into()),
        file => modules::is_wanted(file).then(|| Path::new("lib/modules").join(release).join(file)),
    }
}

/// An instance of apt with the sources of one kernel.
#[derive(Debug)]
struct AptInstance {
    folder: PathBuf,
}

impl AptInstance {
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let path = self.folder.display();
        let options = [
            format!("Dir::Etc::sourcelist={path}/sources.list"),
            "Dir::Etc::sourceparts=/dev/null".to_owned(),
            "Dir::Etc::preferencesparts=/dev/null".to_owned(),
            "Dir::Etc::preferences=/dev/null".to_owned(),
            format!("Dir::State={path}"),
            // An empty status file: no package counts as installed.
            format!("Dir::State::status={path}/status"),
            format!("Dir::Cache={path}"),
            "APT::Architecture=amd64".to_owned(),
            // apt's sandbox user could not write to this directory.
            "APT::Sandbox::User=root".to_owned(),
            "APT::Update::Error-Mode=any".to_owned(),
            "Acquire::Languages=none".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
        ];
        options.iter().for_each(|option| _ = command.args(["-o", option]));
        command
    }

    /// Updates the lists of the kernel's suites, unless they are younger than a day.
    fn update(&self, kernel: &SupportedKernel, mirrors: &DebianMirrors) -> Result<()> {
        if !Path::new(KEYRING).exists() {
            bail!(
                "{KEYRING} is missing, by which packages are checked: install debian-archive-keyring"
            );
        }
        let mut sources = String::new();
        let suites = kernel.suites.iter().map(|suite| (&mirrors.archive, *suite));
        let security = mirrors.security.iter().zip(kernel.security);
        for (mirror, suite) in suites.chain(security) {
            sources += &format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n");
        }
        let (list, updated) = (self.folder.join("sources.list"), self.folder.join("updated"));
        // Other sources make the lists useless, however young they are.
        let is_same = fs::read_to_string(&list).is_ok_and(|text| text == sources);
        let age =
            updated.metadata().and_then(|metadata| metadata.modified()).map(|at| at.elapsed());
        if is_same && age.is_ok_and(|age| age.is_ok_and(|age| age < LISTS_MAX_AGE)) {
            return Ok(());
        }
        for folder in ["lists/partial", "archives/partial"] {
            let folder = self.folder.join(folder);
            fs::create_dir_all(&folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        fs::write(&list, sources)?;
        fs::write(self.folder.join("status"), "")?;
        match sh::capture(self.command("apt-get").args(["-qq", "update"])) {
            Ok(_) => Ok(fs::write(updated, "")?),
            // The newest kernel of the last update is better than none.
            Err(error) if is_same && updated.exists() => {
                println!("kernels: older lists of packages are taken: {error:#}");
                Ok(())
            }
            Err(error) => Err(error.context("the lists of packages cannot be had")),
        }
    }

    /// All packages of the kernel with this version.
    fn kernel_packages(&self, version: &str) -> Result<Vec<DebianPackage>> {
        let mut debian_packages =
            vec![DebianPackage { name: META_PACKAGE.to_owned(), version: version.to_owned() }];
        // The list grows while it is read: each package may depend on more packages.
        let mut next = 0;
        while let Some(part) = debian_packages.get(next) {
            let name = format!("{}={}", part.name, part.version);
            let show = sh::capture(self.command("apt-cache").args(["show", &name]))?;
            let dependencies: Vec<_> = packages::exact_dependencies(&show)
                .into_iter()
                .filter(|it| !debian_packages.contains(it))
                .collect();
            debian_packages.extend(dependencies);
            next += 1;
        }
        Ok(debian_packages)
    }
}
