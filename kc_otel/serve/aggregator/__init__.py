"""One stream a host: what many recorders send is added up before it leaves the machine."""
