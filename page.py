def write_page(path, verdict):
    raise NotImplementedError
