//! Shell: `rouse delete`: removes manifests and waits until the controller has removed the objects.

use std::{process::ExitCode, time::Duration};

use common::wire::NamespacedName;
use controller::model::object::LocalObjectKind;
use local::layout::NodeLayout;

use crate::{
    apply, args::DeleteArgs, command_error::CommandError, kinds, stdout, store::NodeStore,
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
        match manifests.find(&name)? {
            Some(stored) => {
                manifests.remove(stored)?;
                stdout::print_line(&format!(
                    "{} {:?} deleted",
                    kinds::singular(LocalObjectKind::Service),
                    name.name
                ))?;
                removed.push(name);
            }
            None if args.ignore_not_found => {}
            None => {
                let resource = kinds::plural(LocalObjectKind::Service);
                stdout::print_error(
                    &CommandError::NotFound { resource, name: name.name.to_string() }.to_string(),
                );
                code = ExitCode::FAILURE;
            }
        }
    }
    // Without a controller nothing removes the objects; it will miss the manifest when it starts.
    if !args.no_wait && layout.controller_socket().exists() {
        removed.iter().try_for_each(|name| wait_until_deleted(layout, store, name))?;
    }
    Ok(code)
}

fn service_names(
    store: &NodeStore,
    args: &DeleteArgs,
) -> Result<Vec<NamespacedName>, CommandError> {
    let namespace = args.scope.namespace.as_str();
    let mut out = Vec::new();
    for file in &args.files {
        for (source, text) in apply::read_sources(file, false)? {
            for result in apply::parse_services(&source, &text, None, "delete") {
                out.push(result?.0);
            }
        }
    }
    if args.selections.is_empty() {
        return Ok(out);
    }
    for target in kinds::parse_selections(&args.selections)? {
        // The controller would create any other object again.
        if target.kind != LocalObjectKind::Service {
            let singular = kinds::singular(target.kind);
            return Err(CommandError::Usage(format!(
                "{singular} objects follow from their Service: delete or change that"
            )));
        }
        match target.name {
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
    use crate::{args::NamespaceArgs, store::tests::NodeStoreFixture};

    fn args(names: &[&str]) -> DeleteArgs {
        DeleteArgs {
            selections: names.iter().map(|&word| word.to_owned()).collect(),
            files: vec![],
            scope: NamespaceArgs { namespace: "default".into() },
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
    }
}
