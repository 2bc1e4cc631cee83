//! Pure: rules of volumes and of their mounts (knative/serving `pkg/apis/serving/k8s_validation.go` at 98e5ef9).

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{
    Container, KeyToPath, PodSpec, Volume, VolumeMount, VolumeProjection,
};

use super::{dns_names, metadata, settings::RuleSettings};
use crate::model::{
    cluster_state::PlatformKind,
    config_maps::{Features, Flag},
    problem::Problem,
};

const RESERVED_PATHS: [&str; 3] = ["/", "/dev", "/dev/log"];
/// Mount paths that the local node uses itself.
const LOCAL_PATHS: [&str; 3] = ["/tmp", "/var", "/var/log"];

/// Checks the volumes of a pod.
pub(super) fn check_volumes(
    pod: &PodSpec,
    at: &str,
    settings: &RuleSettings<'_>,
    problems: &mut Vec<Problem>,
) {
    let containers = pod.containers.iter().chain(pod.init_containers.iter().flatten());
    let mounts = containers.flat_map(|it| it.volume_mounts.iter().flatten());
    // A volume without a mount is refused: Knative takes it for a mistake of the user.
    let mounted: BTreeSet<&str> = mounts.map(|mount| mount.name.as_str()).collect();
    let mut names = BTreeSet::new();
    for (index, volume) in pod.volumes.iter().flatten().enumerate() {
        let at = format!("{at}.volumes[{index}]");
        let (name, path) = (volume.name.as_str(), format!("{at}.name"));
        if !names.insert(name) {
            let message = format!("duplicate volume name {name:?}");
            problems.push(Problem::new(&path, message));
        }
        if !mounted.contains(name) {
            let message = format!("volume with name {name:?} not mounted");
            problems.push(Problem::new(&path, message));
        }
        if name.is_empty() {
            problems.push(Problem::missing(path));
        } else if !dns_names::dns1123_errors(name).is_empty() {
            problems.push(Problem::invalid(path, name));
        }
        // Knative's kinds do not matter on the local node: it can only make empty folders.
        if settings.platform == PlatformKind::Local && volume.empty_dir.is_none() {
            let message = "volume support is disabled, but found another than emptyDir";
            let problem = Problem::new(&at, message);
            problems.push(problem.with_advice("the local node has only emptyDir"));
            continue;
        }
        check_kind(volume, &at, settings.features, problems);
        check_contents(volume, &at, problems);
    }
}

/// Checks that a volume has exactly one kind, and one that the installation allows.
fn check_kind(volume: &Volume, at: &str, features: &Features, problems: &mut Vec<Problem>) {
    let name = &volume.name;
    let claim = volume.persistent_volume_claim.as_ref();
    if let Some(claim) = claim {
        // Claims have two features of their own, one for their use and one for writing.
        check_claim(&claim.claim_name, claim.read_only == Some(true), at, features, problems);
    }
    let guarded = [
        ("emptyDir", "EmptyDir", volume.empty_dir.is_some(), features.podspec_volumes_emptydir),
        ("hostPath", "HostPath", volume.host_path.is_some(), features.podspec_volumes_hostpath),
        ("csi", "CSI", volume.csi.is_some(), features.podspec_volumes_csi),
        ("ephemeral", "Ephemeral", volume.ephemeral.is_some(), features.podspec_volumes_ephemeral),
        ("image", "Image", volume.image.is_some(), features.podspec_volumes_image),
    ];
    for (_, kind, set, flag) in guarded {
        if set && flag == Flag::Disabled {
            let message =
                format!("{kind} volume support is disabled, but found {kind} volume {name}");
            problems.push(Problem::new(at, message));
        }
    }
    let claims = features.podspec_persistent_volume_claim;
    let always = [
        ("secret", volume.secret.is_some()),
        ("configMap", volume.config_map.is_some()),
        ("projected", volume.projected.is_some()),
    ];
    let kinds = always.map(|(name, set)| (name, set, Flag::Enabled)).into_iter();
    let kinds = kinds.chain(guarded.map(|(name, _, set, flag)| (name, set, flag)));
    let kinds = kinds.chain([("persistentVolumeClaim", claim.is_some(), claims)]);
    // Kinds that are switched off are not suggested, unless one is set: then its own error says that it is off.
    let (mut set, mut allowed) = (Vec::new(), Vec::new());
    for (name, is_set, flag) in kinds {
        let path = format!("{at}.{name}");
        if is_set {
            set.push(path);
        } else if flag != Flag::Disabled {
            allowed.push(path);
        }
    }
    if set.is_empty() {
        problems.push(Problem::none_set(allowed.join(", ")));
    } else if set.len() > 1 {
        problems.push(Problem::several_set(set.join(", ")));
    }
}

fn check_claim(
    name: &str,
    read_only: bool,
    at: &str,
    features: &Features,
    problems: &mut Vec<Problem>,
) {
    if features.podspec_persistent_volume_claim == Flag::Disabled {
        let message = format!(
            "Persistent volume claim support is disabled, but found persistent volume claim {name}"
        );
        problems.push(Problem::new(at, message));
    }
    if !read_only && features.podspec_persistent_volume_write == Flag::Disabled {
        let message = format!(
            "Persistent volume write support is disabled, but found persistent volume claim {name} that is not read-only"
        );
        problems.push(Problem::new(at, message));
    }
}

fn check_contents(volume: &Volume, at: &str, problems: &mut Vec<Problem>) {
    let secret = volume.secret.as_ref().and_then(|it| it.items.as_deref());
    let map = volume.config_map.as_ref().and_then(|it| it.items.as_deref());
    check_items(secret.unwrap_or_default(), &format!("{at}.secret"), problems);
    check_items(map.unwrap_or_default(), &format!("{at}.configMap"), problems);
    let sources = volume.projected.as_ref().and_then(|it| it.sources.as_deref());
    for (index, source) in sources.unwrap_or_default().iter().enumerate() {
        check_projection(source, &format!("{at}.projected.sources[{index}]"), problems);
    }
    // The other kinds have no content rules of Knative's; `apiserver_rules.rs` has the API server's.
    let Some(dir) = &volume.empty_dir else { return };
    if let Some(medium) = dir.medium.as_deref().filter(|it| !matches!(*it, "" | "Memory")) {
        problems.push(Problem::invalid(format!("{at}.emptyDir.medium"), medium));
    }
    if let Some(limit) = &dir.size_limit
        && (limit.0.starts_with('-') || !metadata::is_quantity(&limit.0))
    {
        problems.push(Problem::invalid(format!("{at}.emptyDir.sizeLimit"), &limit.0));
    }
}

fn check_items(items: &[KeyToPath], at: &str, problems: &mut Vec<Problem>) {
    for (index, item) in items.iter().enumerate() {
        for (name, value) in [("key", &item.key), ("path", &item.path)] {
            if value.is_empty() {
                problems.push(Problem::missing(format!("{at}.items[{index}].{name}")));
            }
        }
    }
}

/// Checks one source of a projected volume.
fn check_projection(source: &VolumeProjection, at: &str, problems: &mut Vec<Problem>) {
    // Each source has exactly one kind; the paths of those that are set tell if that holds.
    let mut set = Vec::new();
    if let Some(secret) = &source.secret {
        set.push(format!("{at}.secret"));
        check_name_set(&secret.name, &format!("{at}.secret"), problems);
        check_items(secret.items.as_deref().unwrap_or_default(), &format!("{at}.secret"), problems);
    }
    if let Some(map) = &source.config_map {
        set.push(format!("{at}.configMap"));
        check_name_set(&map.name, &format!("{at}.configMap"), problems);
        check_items(map.items.as_deref().unwrap_or_default(), &format!("{at}.configMap"), problems);
    }
    if let Some(token) = &source.service_account_token {
        set.push(format!("{at}.serviceAccountToken"));
        if token.path.is_empty() {
            problems.push(Problem::missing(format!("{at}.serviceAccountToken.path")));
        }
    }
    if let Some(downward) = &source.downward_api {
        set.push(format!("{at}.downwardAPI"));
        for (index, item) in downward.items.iter().flatten().enumerate() {
            let at = format!("{at}.downwardAPI.items[{index}]");
            // Each item has a source of its own, like a variable.
            match (&item.field_ref, &item.resource_field_ref) {
                (None, None) => {
                    problems
                        .push(Problem::none_set(format!("{at}.fieldRef, {at}.resourceFieldRef")));
                }
                (Some(_), Some(_)) => {
                    let paths = format!("{at}.fieldRef, {at}.resourceFieldRef");
                    let message = "Within a single item, cannot set both";
                    problems.push(Problem::new(paths, message));
                }
                _ => {}
            }
            if item.path.is_empty() {
                problems.push(Problem::missing(format!("{at}.path")));
            }
        }
    }
    if set.is_empty() {
        let all = ["configMap", "downwardAPI", "secret", "serviceAccountToken"];
        problems.push(Problem::none_set(all.map(|name| format!("{at}.{name}")).join(", ")));
    } else if set.len() > 1 {
        problems.push(Problem::several_set(set.join(", ")));
    }
}

fn check_name_set(name: &str, at: &str, problems: &mut Vec<Problem>) {
    if name.is_empty() {
        problems.push(Problem::missing(format!("{at}.name")));
    }
}

/// Checks the mounts of one container.
pub(super) fn check_mounts(
    pod: &PodSpec,
    container: &Container,
    at: &str,
    platform: PlatformKind,
    problems: &mut Vec<Problem>,
) {
    let mut seen = BTreeSet::new();
    for (index, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let at = format!("{at}.volumeMounts[{index}]");
        let volume = pod.volumes.iter().flatten().find(|volume| volume.name == mount.name);
        if volume.is_none() {
            let message = "volumeMount has no matching volume";
            problems.push(Problem::new(format!("{at}.name"), message));
        }
        check_mount_path(mount, &mut seen, platform, &at, problems);
        check_read_only(mount, volume, &at, problems);
    }
}

fn check_mount_path(
    mount: &VolumeMount,
    seen: &mut BTreeSet<String>,
    platform: PlatformKind,
    at: &str,
    problems: &mut Vec<Problem>,
) {
    let (at, clean) = (format!("{at}.mountPath"), clean_path(&mount.mount_path));
    let reserved = RESERVED_PATHS.contains(&clean.as_str())
        || (platform == PlatformKind::Local && LOCAL_PATHS.contains(&clean.as_str()));
    if mount.mount_path.is_empty() {
        problems.push(Problem::missing(at));
    } else if reserved {
        problems.push(Problem::new(at, format!("mountPath {clean:?} is a reserved path")));
    } else if !mount.mount_path.starts_with('/') {
        problems.push(Problem::invalid(at, &mount.mount_path));
    } else if seen.contains(&clean) {
        problems.push(Problem::invalid(at, format!("{:?} must be unique", mount.mount_path)));
    }
    // Also a refused path, so that a second mount of it is reported as well.
    seen.insert(clean);
}

fn check_read_only(
    mount: &VolumeMount,
    volume: Option<&Volume>,
    at: &str,
    problems: &mut Vec<Problem>,
) {
    // Only pods' own storage and claims can be written; all other kinds must be mounted read-only.
    let written = mount.read_only != Some(true);
    let claim = volume.and_then(|it| it.persistent_volume_claim.as_ref());
    // A claim may be mounted for writing; a rule of its own states when.
    let writable = volume.is_some_and(|it| it.empty_dir.is_some() || it.ephemeral.is_some());
    let path = format!("{at}.readOnly");
    if written && !writable && claim.is_none() {
        let message = "volume mount should be readOnly for this type of volume";
        problems.push(Problem::new(path, message));
    } else if written && claim.is_some_and(|claim| claim.read_only == Some(true)) {
        problems.push(Problem::new(path, "volume is readOnly but volume mount is not"));
    }
}

/// Simplifies a path as Go's `path.Clean` does.
fn clean_path(path: &str) -> String {
    let absolute = path.starts_with('/');
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/').filter(|part| !matches!(*part, "" | ".")) {
        match (part, parts.last()) {
            ("..", Some(last)) if *last != ".." => {
                parts.pop();
            }
            // The parent of the root is the root.
            ("..", _) if absolute => {}
            _ => parts.push(part),
        }
    }
    let joined = parts.join("/");
    match (absolute, joined.as_str()) {
        (true, _) => format!("/{joined}"),
        (false, "") => ".".into(),
        (false, _) => joined,
    }
}
