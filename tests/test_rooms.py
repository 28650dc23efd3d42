"""The rooms of the package: which file imports which."""

import grimp


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports inside of functions count, those for type checkers don't."""
    graph = grimp.build_graph(
        "django_celery_safe", exclude_type_checking_imports=True, cache_dir=None
    )
    cyclic = {
        module
        for module in graph.modules
        if any(
            graph.find_shortest_chain(imported, module) is not None
            for imported in graph.find_modules_directly_imported_by(module)
        )
    }
    assert cyclic == set()
