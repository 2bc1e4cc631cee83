//! Shell: container images for the nodes: Rouse's, the examples', the sandbox's, CoreDNS's, and those of tests.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use super::{
    config::PAUSE_IMAGE, plan::ClusterProcess, programs::ClusterPrograms, start::ClusterStarter,
    state::ClusterPaths,
};
use crate::{
    image::{self, oci_layout},
    lock, sh,
    workspace::CargoWorkspace,
};

const PAUSE_SOURCE: &str = include_str!("pause.c");
/// Registry of the images that xtask makes. It exists nowhere, so nodes can pull none of them.
const OWN_REGISTRY: &str = "dev.local/";
/// Name of the image of the cluster's name server.
pub(crate) const COREDNS: &str = "dev.local/coredns:v1";

/// Images as archives to import, by name: path of the tar file, and digest of the manifest.
pub(crate) type ImageArchives = BTreeMap<String, (PathBuf, String)>;

/// Builds the images of `packages` (all if empty) and those that every node needs, as tar files in `destination`.
pub(crate) fn build_archives(
    workspace: &CargoWorkspace,
    programs: &ClusterPrograms,
    packages: &[String],
    destination: &Path,
) -> Result<ImageArchives> {
    check_examples(workspace)?;
    // The lock covers building and packing, so that two clusters do not write the same files.
    let _lock = lock::acquire(&destination.with_extension("lock"))?;
    let packages_and_names: Vec<(&str, &str)> = image::image_names().collect();
    let requested: Vec<&str> = match packages.is_empty() {
        true => packages_and_names.iter().map(|(package, _)| *package).collect(),
        false => packages.iter().map(String::as_str).collect(),
    };
    let layouts = workspace.target.join("images");
    image::write_layouts(workspace, &requested, &layouts)?;
    fs::create_dir_all(destination)
        .with_context(|| format!("cannot make {}", destination.display()))?;
    let mut images = ImageArchives::new();
    for (package, name) in
        packages_and_names.iter().filter(|(package, _)| requested.contains(package))
    {
        images.insert((*name).to_owned(), pack_archive(&layouts.join(package), name, destination)?);
    }
    let pause = build_pause(destination)?;
    images.insert(
        PAUSE_IMAGE.to_owned(),
        build_program_archive("pause", PAUSE_IMAGE, &pause, destination)?,
    );
    images.insert(
        COREDNS.to_owned(),
        build_program_archive("coredns", COREDNS, programs.file("coredns")?, destination)?,
    );
    Ok(images)
}

/// Fails if an example names an image of ours that nodes do not get: there is no registry to pull it from. Images of
/// public registries are for clusters with a network; tests put the sample application in their place.
fn check_examples(workspace: &CargoWorkspace) -> Result<()> {
    let folder = workspace.root.join("examples");
    for entry in fs::read_dir(&folder).with_context(|| format!("no {}", folder.display()))? {
        let file = entry?.path();
        if file.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        for line in fs::read_to_string(&file)?.lines() {
            let Some(name) = parse_image_name(line) else { continue };
            // Found here, before a test waits in vain for a pod that cannot pull.
            if is_missing(name) {
                bail!("{} names the image {name}, which xtask does not make", file.display());
            }
        }
    }
    Ok(())
}

/// Returns true if the name is that of an image of ours which xtask does not make.
fn is_missing(name: &str) -> bool {
    name.starts_with(OWN_REGISTRY) && !image::image_names().any(|(_, existing)| existing == name)
}

/// Name of the image in a line of a manifest: `- image: dev.local/hello:v1  # …`.
fn parse_image_name(line: &str) -> Option<&str> {
    let rest = line.trim().trim_start_matches("- ").strip_prefix("image:")?;
    let name = rest.split('#').next()?.trim().trim_matches(['"', '\'']);
    (!name.is_empty()).then_some(name)
}

fn build_pause(destination: &Path) -> Result<PathBuf> {
    let (source, program) = (destination.join("pause.c"), destination.join("pause"));
    // The source is kept beside the program, to compile it again only after a change.
    let is_same = fs::read_to_string(&source).is_ok_and(|text| text == PAUSE_SOURCE);
    if !is_same || !program.exists() {
        fs::write(&source, PAUSE_SOURCE)?;
        let mut cc = Command::new("cc");
        sh::capture(cc.args(["-static", "-Os", "-s", "-o"]).arg(&program).arg(&source))?;
    }
    Ok(program)
}

/// Builds an image of a program without libraries that is not one of ours, and packs it in `destination`. `name` may be
/// of any registry.
pub(crate) fn build_foreign_archive(
    program: &Path,
    name: &str,
    destination: &Path,
) -> Result<(PathBuf, String)> {
    let short = program.file_name().and_then(OsStr::to_str);
    let short = short.with_context(|| format!("{} is no program", program.display()))?;
    fs::create_dir_all(destination)
        .with_context(|| format!("cannot make {}", destination.display()))?;
    build_program_archive(short, name, program, destination)
}

/// Builds an image of one program without libraries, and packs it. `short` names the program in the image and the tar
/// file; `name` is the image's name.
fn build_program_archive(
    short: &str,
    name: &str,
    program: &Path,
    destination: &Path,
) -> Result<(PathBuf, String)> {
    let bytes = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
    let folder = destination.join(format!("{short}.layout"));
    let image = oci_layout::ProgramImage { name, program: short, bytes: &bytes, libraries: &[] };
    oci_layout::write(&image, &folder)?;
    pack_archive(&folder, name, destination)
}

/// Packs an OCI layout into a tar file that containerd imports under the full name.
fn pack_archive(layout: &Path, name: &str, destination: &Path) -> Result<(PathBuf, String)> {
    let index = layout.join("index.json");
    let text = fs::read_to_string(&index).with_context(|| format!("no {}", index.display()))?;
    let mut index: serde_json::Value = serde_json::from_str(&text)?;
    let manifest = &mut index["manifests"][0];
    let digest = manifest["digest"].as_str().context("a manifest has a digest")?.to_owned();
    // Without this annotation containerd would import the image without a name.
    manifest["annotations"]["io.containerd.image.name"] = name.into();
    let short = layout.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let file = destination.join(format!("{short}.tar"));
    // Another cluster may be reading the present file, and must find the whole of it or of the next one.
    let unfinished = destination.join(format!("{short}.tar.new"));
    let mut tar = tar::Builder::new(fs::File::create(&unfinished)?);
    tar.append_dir_all("blobs", layout.join("blobs"))?;
    tar.append_path_with_name(layout.join("oci-layout"), "oci-layout")?;
    let bytes = index.to_string().into_bytes();
    let mut header = tar::Header::new_gnu();
    header.set_size(bytes.len() as u64);
    header.set_mode(0o644);
    header.set_cksum();
    tar.append_data(&mut header, "index.json", bytes.as_slice())?;
    tar.finish()
        .and_then(|()| fs::rename(&unfinished, &file))
        .with_context(|| format!("cannot write {}", file.display()))?;
    Ok((file, digest))
}

/// Returns true if `node` has all `images` in their present version.
pub(crate) fn is_loaded(paths: &ClusterPaths, node: u8, images: &ImageArchives) -> bool {
    let digests = loaded_digests(paths, node);
    images.iter().all(|(name, (_, digest))| digests.get(name) == Some(digest))
}

/// Imports the images that `node` lacks, or has in another version.
pub(crate) fn import(starter: &ClusterStarter<'_>, node: u8, images: &ImageArchives) -> Result<()> {
    let mut digests = loaded_digests(starter.paths, node);
    for (name, (file, digest)) in images {
        if digests.get(name) == Some(digest) {
            continue;
        }
        // The node does not see the repository's directories, so the tar file is passed through a pipe.
        let tar =
            fs::File::open(file).with_context(|| format!("cannot read {}", file.display()))?;
        let mut ctr = starter.ctr(node, &["images", "import", "-"])?;
        let output = ctr.stdin(tar).output().context("cannot start ctr")?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            bail!("{} does not take {name}: {stderr}", ClusterProcess::Containerd(node));
        }
        digests.insert(name.clone(), digest.clone());
        // Noted after each image, so that an interrupted load continues with the next one.
        let note = starter.paths.node(node).join("images.json");
        fs::write(note, serde_json::to_string(&digests)?)?;
    }
    Ok(())
}

/// Digests of the images that `node` has, by name.
fn loaded_digests(paths: &ClusterPaths, node: u8) -> BTreeMap<String, String> {
    let text = fs::read_to_string(paths.node(node).join("images.json")).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn images_are_found_in_manifests() {
        assert_eq!(
            parse_image_name("        - image: dev.local/hello:v1"),
            Some("dev.local/hello:v1")
        );
        assert_eq!(parse_image_name("  image: \"x:v1\" # why"), Some("x:v1"));
        assert_eq!(parse_image_name("  # image: x:v1"), None);
        assert_eq!(parse_image_name("  imagePullPolicy: Never"), None);
    }

    #[test]
    fn an_archive_that_is_being_read_stays_whole_while_it_is_packed_again() {
        let folder = std::env::temp_dir().join(format!("rouse-archive-{}", std::process::id()));
        let pack = |bytes: &[u8]| {
            let image =
                oci_layout::ProgramImage { name: "x:v1", program: "x", bytes, libraries: &[] };
            let layout = folder.join("x.layout");
            oci_layout::write(&image, &layout).expect("a layout");
            pack_archive(&layout, "x:v1", &folder).expect("an archive")
        };
        let (file, first) = pack(b"first");
        let mut reader = fs::File::open(&file).expect("an archive");
        let whole = fs::read(&file).expect("an archive");
        let (packed_again, second) = pack(b"second");
        let mut read = Vec::new();
        io::Read::read_to_end(&mut reader, &mut read).expect("it can be read");
        assert_eq!((read, packed_again), (whole, file));
        assert_ne!(first, second);
        fs::remove_dir_all(folder).expect("it is there");
    }

    #[test]
    fn only_images_of_ours_can_be_missing() {
        let names = ["dev.local/hello:v1", "dev.local/hullo:v1", "docker.io/library/redis:8"];
        assert_eq!(names.map(is_missing), [false, true, false]);
    }
}
