//! Pure: names of kinds, and the objects that a command's arguments select.

use controller::render::ObjectKind;

use crate::failure::Failure;

/// Selection of objects by a command: all objects of a kind, or one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Kind of the selected objects.
    pub(crate) kind: ObjectKind,
    /// Name of the object; `None`: all objects of the kind.
    pub(crate) name: Option<String>,
}

/// Singular of the kind with its group, as in `service.serving.knative.dev/hello`.
pub(crate) fn singular(kind: ObjectKind) -> &'static str {
    match kind {
        ObjectKind::Service => "service.serving.knative.dev",
        ObjectKind::Configuration => "configuration.serving.knative.dev",
        ObjectKind::Revision => "revision.serving.knative.dev",
        ObjectKind::Route => "route.serving.knative.dev",
        ObjectKind::Pod => "pod",
        ObjectKind::PodAutoscaler => "podautoscaler.autoscaling.internal.knative.dev",
        ObjectKind::ServerlessService => "serverlessservice.networking.internal.knative.dev",
    }
}

/// Plural of the kind with its group, as in `services.serving.knative.dev "hello" not found`.
pub(crate) fn plural(kind: ObjectKind) -> &'static str {
    match kind {
        ObjectKind::Service => "services.serving.knative.dev",
        ObjectKind::Configuration => "configurations.serving.knative.dev",
        ObjectKind::Revision => "revisions.serving.knative.dev",
        ObjectKind::Route => "routes.serving.knative.dev",
        ObjectKind::Pod => "pods",
        ObjectKind::PodAutoscaler => "podautoscalers.autoscaling.internal.knative.dev",
        ObjectKind::ServerlessService => "serverlessservices.networking.internal.knative.dev",
    }
}

/// API groups of Rouse's kinds, as suffixes that a kind's name may have.
const GROUPS: [&str; 3] = [
    ".serving.knative.dev",
    ".autoscaling.internal.knative.dev",
    ".networking.internal.knative.dev",
];

/// Finds the kind that `word` names: singular, plural or short name, with or without group.
pub(crate) fn kind(word: &str) -> Result<ObjectKind, Failure> {
    let lower = word.to_ascii_lowercase();
    let bare = GROUPS.iter().find_map(|group| lower.strip_suffix(group)).unwrap_or(&lower);
    match bare {
        // Unlike in kubectl, `svc` and `service` are Knative's: the local node has no other Services.
        "service" | "services" | "ksvc" | "kservice" | "kservices" | "svc" => {
            Ok(ObjectKind::Service)
        }
        "configuration" | "configurations" | "config" | "cfg" => Ok(ObjectKind::Configuration),
        "revision" | "revisions" | "rev" => Ok(ObjectKind::Revision),
        "route" | "routes" | "rt" => Ok(ObjectKind::Route),
        "pod" | "pods" | "po" => Ok(ObjectKind::Pod),
        "podautoscaler" | "podautoscalers" | "kpa" | "pa" => Ok(ObjectKind::PodAutoscaler),
        "serverlessservice" | "serverlessservices" | "sks" => Ok(ObjectKind::ServerlessService),
        _ => Err(Failure::Kind(word.to_owned())),
    }
}

/// Kinds that `all` selects; as in Knative, internal kinds do not belong to that category.
const COMMON: [ObjectKind; 5] = [
    ObjectKind::Service,
    ObjectKind::Configuration,
    ObjectKind::Revision,
    ObjectKind::Route,
    ObjectKind::Pod,
];

/// Parses `TYPE[,TYPE…] [NAME…]` or `TYPE/NAME…` into selections.
pub(crate) fn targets(words: &[String]) -> Result<Vec<Target>, Failure> {
    let [first, names @ ..] = words else {
        return Err(Failure::Usage("You must specify the type of resource.".to_owned()));
    };
    // One slash makes all words TYPE/NAME; as in kubectl the two forms do not mix.
    if words.iter().any(|word| word.contains('/')) {
        return words.iter().map(|word| one(word)).collect();
    }
    let kinds: Vec<ObjectKind> = if first == "all" {
        COMMON.to_vec()
    } else {
        first.split(',').map(kind).collect::<Result<_, _>>()?
    };
    if names.is_empty() {
        return Ok(kinds.into_iter().map(|kind| Target { kind, name: None }).collect());
    }
    let of = |kind| names.iter().map(move |name| Target { kind, name: Some(name.clone()) });
    Ok(kinds.into_iter().flat_map(of).collect())
}

fn one(word: &str) -> Result<Target, Failure> {
    match word.split_once('/') {
        Some((of, name)) if !name.is_empty() && !name.contains('/') => {
            Ok(Target { kind: kind(of)?, name: Some(name.to_owned()) })
        }
        _ => Err(Failure::Usage(format!(
            "there is no need to mix TYPE NAME and TYPE/NAME: {word:?} must be TYPE/NAME"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn a_kind_has_many_names() {
        let table = [
            (
                ObjectKind::Service,
                "ksvc kservice service services Services service.serving.knative.dev",
            ),
            (ObjectKind::Configuration, "configuration configurations cfg config"),
            (ObjectKind::Revision, "revision revisions rev revisions.serving.knative.dev"),
            (ObjectKind::Route, "route routes rt"),
            (ObjectKind::Pod, "pod pods po"),
            (
                ObjectKind::PodAutoscaler,
                "pa kpa podautoscaler podautoscalers podautoscalers.autoscaling.internal.knative.dev",
            ),
            (
                ObjectKind::ServerlessService,
                "sks serverlessservices serverlessservice.networking.internal.knative.dev",
            ),
        ];
        for (expected, names) in table {
            for name in names.split(' ') {
                assert_eq!(kind(name).unwrap(), expected, "{name}");
            }
        }
        let unknown = kind("deployments").unwrap_err().to_string();
        assert_eq!(unknown, "error: the server doesn't have a resource type \"deployments\"");
    }

    #[test]
    fn words_point_at_kinds_or_objects() {
        let target = |kind, name: Option<&str>| Target { kind, name: name.map(Into::into) };
        let (service, pod) = (ObjectKind::Service, ObjectKind::Pod);
        assert_eq!(targets(&words("ksvc")).unwrap(), [target(service, None)]);
        assert_eq!(targets(&words("ksvc,po")).unwrap(), [target(service, None), target(pod, None)]);
        let both = [target(service, Some("a")), target(service, Some("b"))];
        assert_eq!(targets(&words("ksvc a b")).unwrap(), both);
        let mixed = [target(service, Some("a")), target(pod, Some("b"))];
        assert_eq!(targets(&words("ksvc/a pods/b")).unwrap(), mixed);
        assert_eq!(targets(&words("all")).unwrap().len(), 5);
        assert!(targets(&words("ksvc a/b")).is_err());
        assert!(targets(&words("ksvc/a b")).is_err());
    }
}
