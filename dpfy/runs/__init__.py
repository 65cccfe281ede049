"""The run folder of any release: claims reserved in order, secrets, artefacts, resume, report at the
end.
"""
