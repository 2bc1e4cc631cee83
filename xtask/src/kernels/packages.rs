//! Pure: parsers of apt's output about packages.

/// A package in one version.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DebianPackage {
    pub(crate) name: String,
    pub(crate) version: String,
}

/// Highest version that `apt-cache madison` lists, which is the first.
pub(crate) fn highest_version(madison: &str) -> Option<String> {
    let version = madison.lines().next()?.split('|').nth(1)?.trim();
    Some(version.to_owned()).filter(|version| !version.is_empty())
}

/// Packages of the same kernel build that a package depends on, from `apt-cache show`: those of exactly one
/// version.
pub(crate) fn exact_dependencies(show: &str) -> Vec<DebianPackage> {
    let depends = show.lines().find_map(|line| line.strip_prefix("Depends: ")).unwrap_or_default();
    depends.split(',').filter_map(parse_exact_dependency).collect()
}

/// Parses one dependency of an exact version: `linux-image-6.1.0-50-amd64 (= 6.1.176-1)`.
fn parse_exact_dependency(depend: &str) -> Option<DebianPackage> {
    let (name, version) = depend.trim().split_once(" (= ")?;
    let version = version.strip_suffix(')')?;
    name.starts_with("linux-")
        .then(|| DebianPackage { name: name.to_owned(), version: version.to_owned() })
}

/// URIs of two mirrors in apt's sources: of the archive, and of security fixes. Debian always keeps these in
/// directories of the same names.
pub(crate) fn parse_mirrors(targets: &str) -> (Option<String>, Option<String>) {
    let mirror_of = |folder: &str| {
        let mut uris = targets.lines().map(|line| line.trim().trim_end_matches('/'));
        uris.find(|uri| uri.ends_with(folder)).map(str::to_owned)
    };
    (mirror_of("/debian"), mirror_of("/debian-security"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_version_listed_is_the_highest() {
        let madison = "linux-image-amd64 | 6.1.192-2 | URI bookworm-security/main amd64 Packages\n\
                       linux-image-amd64 | 6.1.176-1 | URI bookworm/main amd64 Packages\n";
        assert_eq!(highest_version(madison).as_deref(), Some("6.1.192-2"));
        assert_eq!(highest_version(""), None);
    }

    #[test]
    fn parts_of_a_kernel_are_those_of_its_very_version() {
        let show = "Package: linux-image-7.3.4+deb13-amd64\n\
                    Depends: dracut | initramfs-tools (>= 0.120), linux-base (>= 4), \
                    linux-modules-7.3.4+deb13-amd64 (= 7.3.4-1~bpo13+1)\n";
        let name = "linux-modules-7.3.4+deb13-amd64".to_owned();
        assert_eq!(
            exact_dependencies(show),
            [DebianPackage { name, version: "7.3.4-1~bpo13+1".to_owned() }]
        );
        assert_eq!(exact_dependencies("Package: x\n"), []);
    }

    #[test]
    fn mirrors_are_known_by_their_folders() {
        let targets = "http://a.example/other/\nhttp://b.example/debian/\nhttp://b.example/debian-security/\n";
        let (archive, security) = parse_mirrors(targets);
        assert_eq!(archive.as_deref(), Some("http://b.example/debian"));
        assert_eq!(security.as_deref(), Some("http://b.example/debian-security"));
        assert_eq!(parse_mirrors("http://a.example/ubuntu/\n"), (None, None));
    }
}
