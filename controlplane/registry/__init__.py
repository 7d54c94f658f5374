"""Projects, runs, epochs, versions, patches, anchors, blobs and channels: what was published and where it is."""
