//! Pure: names of kinds, and the objects that a command's arguments select.

use controller::model::object::LocalObjectKind;

use crate::command_error::CommandError;

/// Selection of objects by a command: all objects of a kind, or one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ObjectSelection {
    /// Kind of the selected objects.
    pub(crate) kind: LocalObjectKind,
    /// Name of the object; `None`: all objects of the kind.
    pub(crate) name: Option<String>,
}

/// Singular of the kind with its group, as in `service.serving.knative.dev/hello`.
pub(crate) fn singular(kind: LocalObjectKind) -> &'static str {
    match kind {
        LocalObjectKind::Service => "service.serving.knative.dev",
        LocalObjectKind::Configuration => "configuration.serving.knative.dev",
        LocalObjectKind::Revision => "revision.serving.knative.dev",
        LocalObjectKind::Route => "route.serving.knative.dev",
        LocalObjectKind::Pod => "pod",
        LocalObjectKind::PodAutoscaler => "podautoscaler.autoscaling.internal.knative.dev",
        LocalObjectKind::ServerlessService => "serverlessservice.networking.internal.knative.dev",
    }
}

/// Plural of the kind with its group, as in `services.serving.knative.dev "hello" not found`.
pub(crate) fn plural(kind: LocalObjectKind) -> &'static str {
    match kind {
        LocalObjectKind::Service => "services.serving.knative.dev",
        LocalObjectKind::Configuration => "configurations.serving.knative.dev",
        LocalObjectKind::Revision => "revisions.serving.knative.dev",
        LocalObjectKind::Route => "routes.serving.knative.dev",
        LocalObjectKind::Pod => "pods",
        LocalObjectKind::PodAutoscaler => "podautoscalers.autoscaling.internal.knative.dev",
        LocalObjectKind::ServerlessService => "serverlessservices.networking.internal.knative.dev",
    }
}

/// API groups of Rouse's kinds, as suffixes that a kind's name may have.
const GROUPS: [&str; 3] = [
    ".serving.knative.dev",
    ".autoscaling.internal.knative.dev",
    ".networking.internal.knative.dev",
];

/// Finds the kind that `word` names: singular, plural or short name, with or without group.
pub(crate) fn parse_kind(word: &str) -> Result<LocalObjectKind, CommandError> {
    let lower = word.to_ascii_lowercase();
    let bare = GROUPS.iter().find_map(|group| lower.strip_suffix(group)).unwrap_or(&lower);
    match bare {
        // Unlike in kubectl, `svc` and `service` are Knative's: the local node has no other Services.
        "service" | "services" | "ksvc" | "kservice" | "kservices" | "svc" => {
            Ok(LocalObjectKind::Service)
        }
        "configuration" | "configurations" | "config" | "cfg" => Ok(LocalObjectKind::Configuration),
        "revision" | "revisions" | "rev" => Ok(LocalObjectKind::Revision),
        "route" | "routes" | "rt" => Ok(LocalObjectKind::Route),
        "pod" | "pods" | "po" => Ok(LocalObjectKind::Pod),
        "podautoscaler" | "podautoscalers" | "kpa" | "pa" => Ok(LocalObjectKind::PodAutoscaler),
        "serverlessservice" | "serverlessservices" | "sks" => {
            Ok(LocalObjectKind::ServerlessService)
        }
        _ => Err(CommandError::UnknownKind(word.to_owned())),
    }
}

/// Kinds that `all` selects; as in Knative, internal kinds do not belong to that category.
const ALL_CATEGORY_KINDS: [LocalObjectKind; 5] = [
    LocalObjectKind::Service,
    LocalObjectKind::Configuration,
    LocalObjectKind::Revision,
    LocalObjectKind::Route,
    LocalObjectKind::Pod,
];

/// Parses `TYPE[,TYPE…] [NAME…]` or `TYPE/NAME…` into selections.
pub(crate) fn parse_selections(words: &[String]) -> Result<Vec<ObjectSelection>, CommandError> {
    let [first, names @ ..] = words else {
        return Err(CommandError::Usage("You must specify the type of resource.".to_owned()));
    };
    // One slash makes all words TYPE/NAME; as in kubectl the two forms do not mix.
    if words.iter().any(|word| word.contains('/')) {
        return words.iter().map(|word| parse_selection(word)).collect();
    }
    let kinds: Vec<LocalObjectKind> = if first == "all" {
        ALL_CATEGORY_KINDS.to_vec()
    } else {
        first.split(',').map(parse_kind).collect::<Result<_, _>>()?
    };
    if names.is_empty() {
        return Ok(kinds.into_iter().map(|kind| ObjectSelection { kind, name: None }).collect());
    }
    let selections_of =
        |kind| names.iter().map(move |name| ObjectSelection { kind, name: Some(name.clone()) });
    Ok(kinds.into_iter().flat_map(selections_of).collect())
}

fn parse_selection(word: &str) -> Result<ObjectSelection, CommandError> {
    match word.split_once('/') {
        Some((kind_name, name)) if !name.is_empty() && !name.contains('/') => {
            Ok(ObjectSelection { kind: parse_kind(kind_name)?, name: Some(name.to_owned()) })
        }
        _ => Err(CommandError::Usage(format!(
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
                LocalObjectKind::Service,
                "ksvc kservice service services Services service.serving.knative.dev",
            ),
            (LocalObjectKind::Configuration, "configuration configurations cfg config"),
            (LocalObjectKind::Revision, "revision revisions rev revisions.serving.knative.dev"),
            (LocalObjectKind::Route, "route routes rt"),
            (LocalObjectKind::Pod, "pod pods po"),
            (
                LocalObjectKind::PodAutoscaler,
                "pa kpa podautoscaler podautoscalers podautoscalers.autoscaling.internal.knative.dev",
            ),
            (
                LocalObjectKind::ServerlessService,
                "sks serverlessservices serverlessservice.networking.internal.knative.dev",
            ),
        ];
        for (expected, names) in table {
            for name in names.split(' ') {
                assert_eq!(parse_kind(name).unwrap(), expected, "{name}");
            }
        }
        let unknown = parse_kind("deployments").unwrap_err().to_string();
        assert_eq!(unknown, "error: the server doesn't have a resource type \"deployments\"");
    }

    #[test]
    fn words_point_at_kinds_or_objects() {
        let target =
            |kind, name: Option<&str>| ObjectSelection { kind, name: name.map(Into::into) };
        let (service, pod) = (LocalObjectKind::Service, LocalObjectKind::Pod);
        assert_eq!(parse_selections(&words("ksvc")).unwrap(), [target(service, None)]);
        assert_eq!(
            parse_selections(&words("ksvc,po")).unwrap(),
            [target(service, None), target(pod, None)]
        );
        let both = [target(service, Some("a")), target(service, Some("b"))];
        assert_eq!(parse_selections(&words("ksvc a b")).unwrap(), both);
        let mixed = [target(service, Some("a")), target(pod, Some("b"))];
        assert_eq!(parse_selections(&words("ksvc/a pods/b")).unwrap(), mixed);
        assert_eq!(parse_selections(&words("all")).unwrap().len(), 5);
        assert!(parse_selections(&words("ksvc a/b")).is_err());
        assert!(parse_selections(&words("ksvc/a b")).is_err());
    }
}
