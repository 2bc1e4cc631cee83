//! Shell: `rouse delete`: removes manifests and waits until the controller has removed the objects.

use std::{process::ExitCode, time::Duration};

use common::wire::NamespacedName;
use controller::model::object::LocalObjectKind;
use local::layout::NodeLayout;

use crate::{
    apply, args::DeleteArgs, command_error::CommandError, kinds, manifests::ManifestFolder, stdout,
    store::NodeStore,
};

/// Interval between two checks of an object that is being deleted.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Deletes services by name or manifest; one that is missing does not stop the others.
pub(crate) fn delete(
    layout: &NodeLayout,
    store: &NodeStore,
    args: &DeleteArgs,
) -> Result<ExitCode, CommandError> {
    let mut code = ExitCode::SUCCESS;
    let (mut removed, mut manifests) = (Vec::new(), store.manifests());
    for name in service_names(store, args)? {
        if remove_manifests(&mut manifests, &name)? {
            stdout::print_line(&format!(
                "{} {:?} deleted",
                kinds::singular(LocalObjectKind::Service),
                name.name
            ))?;
            // All manifests are removed before any wait, so that the services end at the same time.
            removed.push(name);
        } else if !args.ignore_not_found {
            let resource = kinds::plural(LocalObjectKind::Service);
            stdout::print_error(
                &CommandError::NotFound { resource, name: name.name.to_string() }.to_string(),
            );
            code = ExitCode::FAILURE;
        }
    }
    // Without a controller nothing removes the objects; it will miss the manifest when it starts.
    if !args.no_wait && layout.controller_socket().exists() {
        removed.iter().try_for_each(|name| wait_until_deleted(layout, store, name))?;
    }
    Ok(code)
}

/// Removes a service from all files that name it, as the controller keeps it while one of them does. Returns false if
/// no file did.
fn remove_manifests(
    manifests: &mut ManifestFolder,
    name: &NamespacedName,
) -> Result<bool, CommandError> {
    let _lock = manifests.lock()?;
    let mut is_found = false;
    while let Some(stored) = manifests.find(name)? {
        manifests.remove(stored)?;
        is_found = true;
    }
    Ok(is_found)
}

/// Returns the names of the services to delete: those of the files, then those of the selections.
fn service_names(
    store: &NodeStore,
    args: &DeleteArgs,
) -> Result<Vec<NamespacedName>, CommandError> {
    let namespace = args.namespace.as_deref();
    let mut out = Vec::new();
    for file in &args.files {
        for (source, text) in apply::read_sources(file, false)? {
            for result in apply::parse_services(&source, &text, namespace, "delete") {
                out.push(result?.0);
            }
        }
    }
    if args.selections.is_empty() {
        return Ok(out);
    }
    let namespace = namespace.unwrap_or("default");
    for target in kinds::parse_selections(&args.selections)? {
        // The controller would create any other object again.
        if target.kind != LocalObjectKind::Service {
            let singular = kinds::singular(target.kind);
            return Err(CommandError::Usage(format!(
                "{singular} objects follow from their Service: delete or change that"
            )));
        }
        match target.name {
            Some(_) if args.all => {
                let reason = "name cannot be provided with --all: omit one of them";
                return Err(CommandError::Usage(reason.to_owned()));
            }
            Some(name) => out.push(NamespacedName::new(namespace, name)),
            // Only `--all` deletes without names, as in kubectl: a forgotten name must not delete everything.
            None if args.all => {
                let services = store.objects(LocalObjectKind::Service, Some(namespace))?;
                let name =
                    |it: &serde_json::Value| it["metadata"]["name"].as_str().map(str::to_owned);
                out.extend(
                    services
                        .iter()
                        .filter_map(name)
                        .map(|name| NamespacedName::new(namespace, name)),
                );
            }
            None => {
                let reason =
                    "resource(s) were provided, but no name was specified: name them or say --all";
                return Err(CommandError::Usage(reason.to_owned()));
            }
        }
    }
    Ok(out)
}

fn wait_until_deleted(
    layout: &NodeLayout,
    store: &NodeStore,
    name: &NamespacedName,
) -> Result<(), CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    runtime.block_on(async {
        // The socket is checked each time, because the controller may stop during the wait.
        while store.object(LocalObjectKind::Service, name)?.is_some()
            && layout.controller_socket().exists()
        {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{documents::replace_file, store::tests::NodeStoreFixture};

    fn args(names: &[&str]) -> DeleteArgs {
        DeleteArgs {
            selections: names.iter().map(|&word| word.to_owned()).collect(),
            files: vec![],
            namespace: None,
            all: false,
            ignore_not_found: false,
            no_wait: true,
        }
    }

    #[test]
    fn a_service_is_deleted_with_its_manifest() {
        let (temp, store) = NodeStoreFixture::new("delete");
        let layout = NodeLayout::new("delete-test").unwrap();
        let name = NamespacedName::new("default", "hello");
        let object = json!({"metadata": {"name": "hello", "namespace": "default"}});
        apply::store_manifest(&mut store.manifests(), &name, &object).unwrap();
        let code = delete(&layout, &store, &args(&["ksvc", "hello"])).unwrap();
        assert_eq!((code, temp.manifest_file_names().len()), (ExitCode::SUCCESS, 0));
        let second = delete(&layout, &store, &args(&["ksvc/hello"])).unwrap();
        assert_eq!(second, ExitCode::FAILURE);
        let ignoring_args = DeleteArgs { ignore_not_found: true, ..args(&["ksvc/hello"]) };
        assert_eq!(delete(&layout, &store, &ignoring_args).unwrap(), ExitCode::SUCCESS);
    }

    fn service(namespace: &str) -> serde_json::Value {
        let metadata = json!({"name": "hello", "namespace": namespace});
        json!({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "metadata": metadata})
    }

    #[test]
    fn a_manifest_without_a_namespace_has_the_one_of_the_flag() {
        let (temp, store) = NodeStoreFixture::new("delete-namespace");
        let layout = NodeLayout::new("delete-test").unwrap();
        for namespace in ["default", "demo"] {
            let name = NamespacedName::new(namespace, "hello");
            apply::store_manifest(&mut store.manifests(), &name, &service(namespace)).unwrap();
        }
        let file = temp.path().join("hello.yaml");
        let mut without = service("");
        without["metadata"].as_object_mut().unwrap().remove("namespace");
        replace_file(&file, &[without]).unwrap();
        let delete_in = |namespace: &str| {
            let namespace = Some(namespace.to_owned());
            let args = DeleteArgs { files: vec![file.clone()], namespace, ..args(&[]) };
            delete(&layout, &store, &args)
        };
        assert_eq!(delete_in("demo").unwrap(), ExitCode::SUCCESS);
        assert_eq!(temp.manifest_file_names(), ["default_hello.yaml"]);
        replace_file(&file, &[service("default")]).unwrap();
        let error = delete_in("demo").unwrap_err().to_string();
        assert!(error.contains("pass '--namespace=default'"), "{error}");
        assert_eq!(temp.manifest_file_names(), ["default_hello.yaml"]);
    }

    #[test]
    fn a_service_is_removed_from_each_file_that_names_it() {
        let (temp, store) = NodeStoreFixture::new("delete-copies");
        let layout = NodeLayout::new("delete-test").unwrap();
        let manifests = temp.path().join("manifests");
        let mut other_kind = service("default");
        other_kind["kind"] = json!("Deployment");
        replace_file(&manifests.join("default_hello.yaml"), &[service("default")]).unwrap();
        replace_file(&manifests.join("a.yaml"), &[service("demo"), service("default")]).unwrap();
        replace_file(&manifests.join("b.yaml"), &[other_kind, service("default")]).unwrap();
        assert_eq!(delete(&layout, &store, &args(&["ksvc/hello"])).unwrap(), ExitCode::SUCCESS);
        assert_eq!(temp.manifest_file_names(), ["a.yaml"]);
        let mut rest = store.manifests();
        assert!(rest.find(&NamespacedName::new("default", "hello")).unwrap().is_none());
        assert!(rest.find(&NamespacedName::new("demo", "hello")).unwrap().is_some());
    }

    #[test]
    fn errors_of_manifests_name_the_command() {
        let (_temp, store) = NodeStoreFixture::new("delete-file");
        let layout = NodeLayout::new("delete-test").unwrap();
        let file = std::env::temp_dir().join(format!("rouse-delete-{}.yaml", std::process::id()));
        for (text, reason) in [
            ("", "no objects passed to delete"),
            ("metadata: {name: x}", "kind is not set: delete a serving.knative.dev/v1 Service"),
            ("kind: Pod", "in version \"\": delete a serving.knative.dev/v1 Service"),
        ] {
            std::fs::write(&file, text).unwrap();
            let args = DeleteArgs { files: vec![file.clone()], ..args(&[]) };
            let error = delete(&layout, &store, &args).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        std::fs::remove_file(file).unwrap();
    }

    #[test]
    fn objects_that_follow_from_a_service_cannot_be_deleted_alone() {
        let (_temp, store) = NodeStoreFixture::new("delete-pod");
        let layout = NodeLayout::new("delete-test").unwrap();
        let error = delete(&layout, &store, &args(&["pod", "x"])).unwrap_err().to_string();
        assert_eq!(error, "error: pod objects follow from their Service: delete or change that");
        let nameless = delete(&layout, &store, &args(&["ksvc"])).unwrap_err().to_string();
        assert!(nameless.contains("no name was specified"));
        let both = DeleteArgs { all: true, ..args(&["ksvc", "hello"]) };
        let both = delete(&layout, &store, &both).unwrap_err().to_string();
        assert!(both.contains("with --all"), "{both}");
    }
}
