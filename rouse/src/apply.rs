//! Shell: `rouse apply`: stores manifests in the node's folder, one file per object.

use std::{io::Read as _, path::Path, process::ExitCode};

use common::wire::{NamespacedName, is_dns_label, is_dns_subdomain};
use controller::{
    model::{object::LocalObjectKind, problem, scale_policy::ScalePolicyConfig},
    read::parse,
};
use serde_json::{Value, json};

use crate::{
    args::ApplyArgs,
    command_error::{CommandError, error_line},
    documents, kinds,
    manifests::{ManifestFolder, ManifestLocation},
    stdout,
    store::NodeStore,
};

/// Result of applying one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ApplyOutcome {
    /// The object did not exist before.
    Created,
    /// The object existed and has changed.
    Configured,
    /// The object existed in the same form.
    Unchanged,
}

/// Applies every object of the files; an invalid one does not stop the others.
pub(crate) fn apply(store: &NodeStore, args: &ApplyArgs) -> Result<ExitCode, CommandError> {
    let (mut code, mut manifests) = (ExitCode::SUCCESS, store.manifests());
    for file in &args.files {
        for (source, text) in read_sources(file, args.recursive)? {
            for result in parse_services(&source, &text, args.namespace.as_deref(), "apply") {
                let result = result.and_then(|(name, object)| {
                    Ok((store_manifest(&mut manifests, &name, &object)?, name, object))
                });
                match result {
                    Ok((outcome, name, object)) => report_outcome(outcome, &name, &object)?,
                    Err(failure) => {
                        stdout::print_error(&error_line(&failure.into()));
                        code = ExitCode::FAILURE;
                    }
                }
            }
        }
    }
    Ok(code)
}

/// Reads the texts that `-f` names, each with its source for messages.
pub(crate) fn read_sources(
    file: &Path,
    recursive: bool,
) -> Result<Vec<(String, String)>, CommandError> {
    if file == Path::new("-") {
        let mut text = String::new();
        let read = std::io::stdin().read_to_string(&mut text);
        read.map_err(CommandError::file_error("read", "standard input"))?;
        return Ok(vec![("standard input".to_owned(), text)]);
    }
    let paths = match file.is_dir() {
        true => documents::manifest_files(file, recursive)?,
        false => vec![file.to_owned()],
    };
    if paths.is_empty() {
        let reason = "holds no .yaml, .yml or .json file".to_owned();
        return Err(CommandError::Manifest { file: file.display().to_string(), reason });
    }
    let read = |path: std::path::PathBuf| {
        let text =
            std::fs::read_to_string(&path).map_err(CommandError::file_error("read", &path))?;
        Ok((path.display().to_string(), text))
    };
    paths.into_iter().map(read).collect()
}

/// Services of a text, each with its name, or the reason why a document is invalid. Reasons name `command`, which is
/// `apply` or `delete`.
pub(crate) fn parse_services(
    source: &str,
    text: &str,
    namespace: Option<&str>,
    command: &str,
) -> Vec<Result<(NamespacedName, Value), CommandError>> {
    let to_error = |reason: String| CommandError::Manifest { file: source.to_owned(), reason };
    match documents::parse_documents(text) {
        Err(reason) => vec![Err(to_error(format!("not readable as YAML: {reason}")))],
        Ok(objects) if objects.is_empty() => {
            vec![Err(to_error(format!("no objects passed to {command}")))]
        }
        Ok(objects) => objects
            .into_iter()
            .map(|it| check_manifest(it, namespace, command).map_err(to_error))
            .collect(),
    }
}

/// Checks what is needed to store an object; the controller checks the rest and reports it on the object.
fn check_manifest(
    mut object: Value,
    namespace: Option<&str>,
    command: &str,
) -> Result<(NamespacedName, Value), String> {
    let field = |path: &str| object.pointer(path).and_then(Value::as_str).map(str::to_owned);
    let version = field("/apiVersion").unwrap_or_default();
    let kind = field("/kind")
        .ok_or_else(|| format!("kind is not set: {command} a serving.knative.dev/v1 Service"))?;
    // Only Services are stored: the local node derives all other kinds from them.
    if version != controller::model::knative::API_VERSION || kind != "Service" {
        return Err(format!(
            "no matches for kind {kind:?} in version {version:?}: {command} a serving.knative.dev/v1 Service; \
             its Configuration, Revisions and Route follow from it"
        ));
    }
    let name =
        field("/metadata/name").ok_or("resource name may not be empty: set metadata.name")?;
    if !is_dns_subdomain(&name) {
        return Err(format!(
            "metadata.name {name:?} is not a name: use a-z, 0-9, '-' and '.', beginning and ending with a \
             letter or digit"
        ));
    }
    // As in kubectl, a contradiction is an error: the user may have meant either namespace.
    let own_namespace = field("/metadata/namespace");
    if let (Some(own_namespace), Some(requested)) = (&own_namespace, namespace)
        && own_namespace != requested
    {
        return Err(format!(
            "the namespace from the provided object {own_namespace:?} does not match the namespace {requested:?}: pass \
             '--namespace={own_namespace}'"
        ));
    }
    let namespace = own_namespace.unwrap_or_else(|| namespace.unwrap_or("default").to_owned());
    if !is_dns_label(&namespace) {
        return Err(format!(
            "metadata.namespace {namespace:?} is not a name: use a-z, 0-9 and inner '-'"
        ));
    }
    // Written into the manifest, since its file alone must identify the service.
    object["metadata"]["namespace"] = json!(namespace);
    Ok((NamespacedName::new(namespace, name), object))
}

/// Stores the manifest of a service, in place of an earlier one.
pub(crate) fn store_manifest(
    manifests: &mut ManifestFolder,
    name: &NamespacedName,
    object: &Value,
) -> Result<ApplyOutcome, CommandError> {
    // Held from the search to the write: another `apply` may be changing the same file.
    let _lock = manifests.lock()?;
    let stored = manifests.find(name)?;
    let outcome = match stored.as_ref().map(ManifestLocation::manifest) {
        None => ApplyOutcome::Created,
        Some(old) if old == object => return Ok(ApplyOutcome::Unchanged),
        Some(_) => ApplyOutcome::Configured,
    };
    manifests.write(name, object, stored)?;
    Ok(outcome)
}

fn report_outcome(
    outcome: ApplyOutcome,
    name: &NamespacedName,
    object: &Value,
) -> Result<(), CommandError> {
    let did = match outcome {
        ApplyOutcome::Created => "created",
        ApplyOutcome::Configured => "configured",
        ApplyOutcome::Unchanged => "unchanged",
    };
    stdout::print_line(&format!(
        "{}/{} {did}",
        kinds::singular(LocalObjectKind::Service),
        name.name
    ))?;
    // The controller reports the same as a condition; the warning saves the user a `rouse get`.
    warnings(name, object).iter().for_each(|it| stdout::print_error(&format!("Warning: {it}")));
    Ok(())
}

/// Warnings on a stored object: the reason why it will not become ready, or else its fields without effect.
fn warnings(name: &NamespacedName, object: &Value) -> Vec<String> {
    let config = ScalePolicyConfig::default();
    match parse::service_manifest(object, &config) {
        Err(problems) => {
            vec![format!("{name} will not become ready: {}", problem::problems_line(&problems))]
        }
        Ok(_) => parse::service_warnings(object, &config).iter().map(ToString::to_string).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::NodeStoreFixture;

    mod fields;

    const HELLO: &str = "
apiVersion: serving.knative.dev/v1
kind: Service
metadata: {name: hello}
spec: {template: {spec: {containers: [{image: dev.local/hello:v1}]}}}
";

    fn parse_error(text: &str, namespace: Option<&str>) -> String {
        let mut result = parse_services("x.yaml", text, namespace, "apply");
        assert_eq!(result.len(), 1);
        result.remove(0).unwrap_err().to_string()
    }

    #[test]
    fn an_object_is_created_then_unchanged_then_configured() {
        let (temp, store) = NodeStoreFixture::new("apply");
        let apply = |text: &str| {
            let (name, object) = parse_services("x.yaml", text, None, "apply").remove(0).unwrap();
            store_manifest(&mut store.manifests(), &name, &object).unwrap()
        };
        assert_eq!(apply(HELLO), ApplyOutcome::Created);
        assert_eq!(apply(HELLO), ApplyOutcome::Unchanged);
        assert_eq!(apply(&HELLO.replace("v1}", "v2}")), ApplyOutcome::Configured);
        assert_eq!(temp.manifest_file_names(), ["default_hello.yaml"]);
        let stored =
            store.manifests().find(&NamespacedName::new("default", "hello")).unwrap().unwrap();
        let image = stored.manifest().pointer("/spec/template/spec/containers/0/image").unwrap();
        assert_eq!(image, "dev.local/hello:v2");
    }

    #[test]
    fn several_documents_become_several_files() {
        let (temp, store) = NodeStoreFixture::new("several");
        let text = format!("{HELLO}---\n{}", HELLO.replace("hello}", "other, namespace: demo}"));
        for result in parse_services("x.yaml", &text, None, "apply") {
            let (name, object) = result.unwrap();
            store_manifest(&mut store.manifests(), &name, &object).unwrap();
        }
        assert_eq!(temp.manifest_file_names(), ["default_hello.yaml", "demo_other.yaml"]);
    }

    #[test]
    fn a_bad_shape_is_refused_in_one_line_that_says_what_to_do() {
        let error =
            parse_error("kind: Deployment\napiVersion: apps/v1\nmetadata: {name: x}\n", None);
        assert!(error.starts_with(
            "error: x.yaml: no matches for kind \"Deployment\" in version \"apps/v1\""
        ));
        assert!(parse_error("a: [", None).contains("not readable as YAML"));
        assert!(parse_error("", None).contains("no objects passed to apply"));
        assert!(
            parse_error(&HELLO.replace("{name: hello}", "{}"), None).contains("set metadata.name")
        );
        assert!(
            parse_error(&HELLO.replace("hello}", "Hello_World}"), None).contains("\"Hello_World\"")
        );
        let other = HELLO.replace("hello}", "hello, namespace: a}");
        assert!(parse_error(&other, Some("b")).contains("pass '--namespace=a'"));
        assert!(
            [parse_error(&other, Some("b")), parse_error("a: [", None)]
                .iter()
                .all(|text| !text.contains('\n'))
        );
    }

    #[test]
    fn fields_without_effect_are_warned_of() {
        let warnings_of = |text: &str| {
            let (name, object) = parse_services("x.yaml", text, None, "apply").remove(0).unwrap();
            warnings(&name, &object)
        };
        assert!(warnings_of(HELLO).is_empty(), "{:?}", warnings_of(HELLO));
        let idle = HELLO.replace("hello}", "hello, annotations: {rouse.dev/paht: activator}}");
        assert_eq!(warnings_of(&idle).len(), 1);
        assert!(
            warnings_of(&idle)[0].contains("rouse.dev/paht has no effect"),
            "{:?}",
            warnings_of(&idle)
        );
        let old = HELLO.replace(
            "{template: {",
            "{template: {metadata: {annotations: {autoscaling.knative.dev/minScale: '1'}}, ",
        );
        assert!(warnings_of(&old)[0].contains("older spelling"), "{:?}", warnings_of(&old));
        let error = HELLO.replace("image:", "imagePullPolicy: Sometimes, image:");
        assert!(
            warnings_of(&error)[0].contains("will not become ready"),
            "{:?}",
            warnings_of(&error)
        );
    }

    #[test]
    fn the_flag_names_the_namespace_of_objects_without_one() {
        let (name, object) =
            parse_services("x.yaml", HELLO, Some("demo"), "apply").remove(0).unwrap();
        assert_eq!(
            (name.to_string().as_str(), &object["metadata"]["namespace"]),
            ("demo/hello", &json!("demo"))
        );
    }
}
